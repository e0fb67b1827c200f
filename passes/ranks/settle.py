"""One rank decides, the others adopt: through the store, and without a collective.

    rank 0   compiles, decides, writes         -> fsdp_compile/budget/0/...
    rank 1   compiles, waits for that, adopts  -> fsdp_compile/budget/1/...    for ranks that share no group with rank 0
    rank 1   compiles again (another length): what it adopted holds, and no rank is asked

A decision by activations' sizes or by free memory would differ between ranks. So the first rank of the groups that a
graph uses decides. With replicas no two ranks have the same groups: each rank follows the lowest one that it shares a
group with, and these chains end at the corner of the mesh.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from .. import _torch_compat as compat
from ..ir.plan import Plan
from .worlds import World, world_of

TIMEOUT_S = 600.0  # until a rank has begun to choose
_PATIENCE = 12  # times TIMEOUT_S until it has chosen: large models take minutes
_CHOOSING = "/choosing"


class Settled:
    """Holds the decisions of memory budgets that this rank has made or adopted, keyed by the parameters of a graph.

    A decision is a plan without launches: what is kept, computed with again, or kept as slices, how far ahead gathers
    are launched, and why.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._decisions: dict[tuple[str, tuple[str, ...]], Plan] = {}
        self._world: World | None = None

    def decision(
        self, about: str, names: tuple[str, ...], groups: Iterable[Sequence[int]], decide: Callable[[int], Plan]
    ) -> Plan:
        """Return the decision for these parameters; ``about`` names the budget, alike on all ranks."""
        store = compat.default_store()
        world = None if store is None else world_of(store)
        if world != self._world:
            self._world, self._decisions = world, {}
        if (about, names) not in self._decisions:
            self._decisions[about, names] = self._settle(about, names, [set(one) for one in groups], store, decide)
        return self._decisions[about, names]

    def _settle(
        self,
        about: str,
        names: tuple[str, ...],
        groups: list[set[int]],
        store: torch.distributed.Store | None,
        decide: Callable[[int], Plan],
    ) -> Plan:
        rank = torch.distributed.get_rank() if store is not None else 0
        others = {one for group in groups for one in group} - {rank}
        if store is None or not others:
            return decide(rank)
        topic = hashlib.sha256(repr((about, names)).encode()).hexdigest()[:16]
        keys = {one: f"fsdp_compile/budget/{world_of(store).number}/{one}/{topic}" for one in (rank, min(others))}
        if min(others) < rank:
            text = self._wait(store, keys, rank, min(others), names)
        else:
            _publish(store, keys[rank] + _CHOOSING, f"{rank}")
            try:
                text = decide(rank).to_json()
            except Exception as error:
                _publish(store, keys[rank], json.dumps({"error": f"rank {rank}: {error}"}))
                raise
        _publish(store, keys[rank], text)
        if "error" in (fields := json.loads(text)):
            raise RuntimeError(f"the rank that chooses what is kept for memory_budget could not: {fields['error']}")
        return Plan.from_json(text)

    def _wait(
        self, store: torch.distributed.Store, keys: dict[int, str], rank: int, first: int, names: tuple[str, ...]
    ) -> str:
        key, began = keys[first], time.monotonic()
        pause_s = 0.01
        chooses = ""  # the rank that decides; ``first`` may follow it, too
        while not store.check([key]):
            waited_s = time.monotonic() - began
            if not chooses and store.check([key + _CHOOSING]):
                chooses = store.get(key + _CHOOSING).decode()
                _publish(store, keys[rank] + _CHOOSING, chooses)  # for ranks that follow this one
            if waited_s > self.timeout_s * (_PATIENCE if chooses else 1):
                raise RuntimeError(
                    f"rank {chooses or first} chooses for this one what is kept for memory_budget, and has not said "
                    f"for {waited_s:.0f} s what that is in a graph of {len(names)} parameters ({names[0]}, ...). "
                    + (
                        "It began to, and did not come to an end: see what it does there, or leave memory_budget out."
                        if chooses
                        else "It compiled no such graph: call configure with the same memory_budget on every rank, in "
                        "the same order, and have all ranks compile the model in the same step. Or leave memory_budget "
                        "out."
                    )
                )
            time.sleep(pause_s)  # in Python, so that an interruption gets through
            pause_s = min(2 * pause_s, 0.5)
        return store.get(key).decode()


def _publish(store: torch.distributed.Store, key: str, text: str) -> None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # of fake groups in tests; else ranks time out
        store.set(key, text)
