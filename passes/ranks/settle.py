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
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from ..ir.plan import Plan
from .worlds import World, current_world

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
            text = self._wait(world, keys, rank, min(others), names)
        else:
            world.put(keys[rank] + _CHOOSING, f"{rank}")
            try:
                text = decide(rank).to_json()
            except Exception as error:
                world.put(keys[rank], json.dumps({"error": f"rank {rank}: {error}"}))
                raise
        world.put(keys[rank], text)
        if "error" in (fields := json.loads(text)):
            raise RuntimeError(f"the rank that chooses what is kept for memory_budget could not: {fields['error']}")
        return Plan.from_json(text)

    def _wait(self, world: World, keys: dict[int, str], rank: int, first: int, names: tuple[str, ...]) -> str:
        key, began = keys[first], time.monotonic()
        pause_s = 0.01
        chooses = ""  # the rank that decides; ``first`` may follow it, too
        while (said := world.get(key)) is None:
            waited_s = time.monotonic() - began
            if not chooses and (chooser := world.get(key + _CHOOSING)) is not None:
                chooses = chooser.decode()
                world.put(keys[rank] + _CHOOSING, chooses)  # for ranks that follow this one
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
        return said.decode()
