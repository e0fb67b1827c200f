"""One rank decides, the others adopt: through the store, and without a collective.

    rank 0   compiles, decides, writes         -> budget/0/...
    rank 1   compiles, waits for that, adopts  -> budget/1/...    for ranks that share no group with rank 0
    rank 1   compiles again (another length): what it adopted holds, and no rank is asked

A decision by activations' sizes or by free memory would differ between ranks. So the first rank of the groups that a
graph uses decides. With replicas no two ranks have the same groups: each rank follows the lowest one that it shares a
group with, and these chains end at the corner of the mesh.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence

import torch

from ..ir.plan import Plan
from ..wire.ledger import Meeting, ledger
from .worlds import World, current_world

TIMEOUT_S = 1800.0  # until a rank has chosen: large models take minutes


class Settled:
    """Holds the decisions of memory budgets that this rank has made or adopted, keyed by the parameters of a graph.

    A decision is a plan without launches: what is kept, computed with again, or kept as slices, how far ahead gathers
    are launched, and why.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._decisions: dict[tuple[World | None, str, tuple[str, ...]], Plan] = {}

    def decision(
        self, about: str, names: tuple[str, ...], groups: Iterable[Sequence[int]], decide: Callable[[int], Plan]
    ) -> Plan:
        """Return the decision for these parameters; ``about`` names the budget, alike on all ranks."""
        world = current_world()
        if (world, about, names) not in self._decisions:
            settled = self._settle(about, names, [set(one) for one in groups], world, decide)
            self._decisions[world, about, names] = settled
        return self._decisions[world, about, names]

    def decided(self, about: str) -> list[Plan]:
        """Return the decisions that this rank has made or adopted for a budget, the first word of their ``about``."""
        world = current_world()
        return [
            plan for (its, said, _), plan in self._decisions.items() if its == world and said.startswith(f"{about} ")
        ]

    def _settle(
        self,
        about: str,
        names: tuple[str, ...],
        groups: list[set[int]],
        world: World | None,
        decide: Callable[[int], Plan],
    ) -> Plan:
        rank = torch.distributed.get_rank() if world is not None else 0
        others = {one for group in groups for one in group} - {rank}
        if world is None or not others:
            return decide(rank)
        topic = hashlib.sha256(repr((about, names)).encode()).hexdigest()[:16]
        keys = {one: f"budget/{one}/{topic}" for one in (rank, min(others))}
        if min(others) < rank:
            text = self._adopt(world, keys[min(others)], (min(others), rank), names)
        else:
            try:
                text = decide(rank).to_json()
            except Exception as error:
                world.put(keys[rank], json.dumps({"error": f"rank {rank}: {error}"}))
                raise
        world.put(keys[rank], text)
        if "error" in (fields := json.loads(text)):
            raise RuntimeError(f"the rank that chooses what is kept for memory_budget could not: {fields['error']}")
        return Plan.from_json(text)

    def _adopt(self, world: World, key: str, ranks: Sequence[int], names: tuple[str, ...]) -> str:
        """Return what the first of these ranks has written, once it has."""
        what = f"what rank {ranks[0]} chooses for memory_budget in a graph of {len(names)} parameters ({names[0]}, ...)"
        advice = (
            "Call configure with the same memory_budget on every rank, in the same order, and have all ranks compile "
            "the model in the same step; or leave memory_budget out."
        )
        ledger.meet(Meeting(what, tuple(ranks)), lambda: world.get(key) is not None, self.timeout_s, advice)
        said = world.get(key)
        assert said is not None
        return said.decode()
