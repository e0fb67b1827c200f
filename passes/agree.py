"""Compare what ranks are going to launch, so that a difference raises an error before it makes them hang.

    a step is planned                        its plan is compared, unless this rank got graphs from a cache
    a graph runs for the first time          the launches listed in its text are compared, from a cache or not

The first rank to get there publishes its plan in the store; the others compare theirs with it. No rank waits: one rank
alone may be recompiling, and a collective here would hang it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch

from . import _torch_compat as compat
from .ledger import GraphText
from .plan import Bucket, Plan
from .worlds import World, world_of


class Agreement:
    """The plans of this rank so far, and the check that the other ranks planned the same.

    The same parameters may be planned again, for another model or with other options: the k-th distinct plan of this
    rank is compared with the k-th of the others. A plan that equals an earlier one, as after a recompilation, does not
    count. A rank that got a graph from a compile cache ran a graph that it did not plan, so it has lost count of plans,
    but not of graphs. A rank that ran a model eagerly has lost count of both, and compares no plan of its parameters.
    """

    # The parameters of each model that this rank ran eagerly, with the world in which it did.
    _ran_eagerly: ClassVar[set[tuple[World, frozenset[str]]]] = set()

    def __init__(self) -> None:
        self._planned: dict[str, list[str]] = {}
        self._world: World | None = None

    @classmethod
    def note_eager(cls, names: frozenset[str]) -> None:
        """Note that this rank runs a model with these parameters eagerly, while others may compile it."""
        store = compat.default_store()
        if store is not None:
            cls._ran_eagerly.add((world_of(store), names))

    def check(self, plan: Plan, groups: Iterable[str]) -> None:
        """Publish the plan, or raise when another rank of its process groups published a different one in its place.

        Each group compares for itself: with replicas no two ranks are in the same set of groups.
        """
        if not compat.served_from_a_cache():
            self._check(plan, groups)

    def check_graph(self, text: GraphText) -> None:
        """Compare the launches of a graph with those on the other ranks, before it runs for the first time."""
        self._check(_plan_of(text), text.groups)

    def _check(self, plan: Plan, groups: Iterable[str]) -> None:
        store = compat.default_store()
        if store is None:
            return
        world = world_of(store)
        if world != self._world:
            self._world, self._planned = world, {}
        # The key has the parameters that a step reads, and not which of them backward gathers again or from slices:
        # plans that differ only in that must have one key, so that they are compared.
        read = (*plan.regather, *plan.keep)
        fqns = sorted(read or (fqn for bucket in _buckets(plan) for fqn in bucket.fqns))
        plain = {re.split("[:@]", fqn)[0] for fqn in fqns}
        if any(of == world and names >= plain for of, names in self._ran_eagerly):
            return
        for ranks in sorted({compat.group_ranks(group) for group in groups}):
            if len(ranks) > 1:
                self._check_within(store, plan, fqns, ranks)

    def _check_within(
        self, store: torch.distributed.Store, plan: Plan, fqns: list[str], ranks: tuple[int, ...]
    ) -> None:
        names = hashlib.sha256(repr((plan.stage, fqns, ranks)).encode()).hexdigest()[:16]
        ours = plan.decisions()
        planned = self._planned.setdefault(names, [])
        if ours in planned:
            return
        try:
            key = f"fsdp_compile/plan/{world_of(store).number}/{names}/{len(planned) + 1}"
            published = store.compare_set(key, "", ours).decode()
        except (RuntimeError, NotImplementedError):
            return  # a store that cannot compare and set (fake groups in tests)
        if published and published != ours:
            raise RuntimeError(_difference(plan, Plan.from_json(published)))
        planned.append(ours)


def _plan_of(text: GraphText) -> Plan:
    """Return a plan with the launches that a graph's text lists, in their order."""
    found: dict[str, list[Bucket]] = {"gather": [], "reduce": []}
    order: list[tuple[str, int]] = []
    for launch in text.launches:
        kind = "gather" if launch.kind == "all_gather" else "reduce"
        order.append((kind, len(found[kind])))
        found[kind].append(Bucket(launch.kind, launch.names, launch.dtype, launch.num_bytes))
    return Plan(text.stage, gathers=tuple(found["gather"]), reduces=tuple(found["reduce"]), order=tuple(order))


def _buckets(plan: Plan) -> Iterator[Bucket]:
    for one in (plan, plan.forward, plan.backward):
        if one is not None:
            yield from (*one.gathers, *one.reduces)


def _difference(plan: Plan, other: Plan) -> str:
    theirs, ours = set(_buckets(other)), set(_buckets(plan))
    apart = f"only here {sorted(map(str, ours - theirs))}, only there {sorted(map(str, theirs - ours))}"
    return (
        f"this rank plans other collectives than the rank that compiled first, for one {plan.stage} graph: "
        f"{apart if ours != theirs else 'the same ones in another order'}. Call fully_shard and configure with the "
        "same arguments on every rank, and run the same versions of torch and fsdp_compile."
    )
