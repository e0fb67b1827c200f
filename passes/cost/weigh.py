"""Count the bytes alive over the two halves of a step; the caller holds forward's inputs and results.

    forward     inputs, and what each node needs                       inputs: shards, buffers, the batch
    backward    inputs, what forward returned, what each node needs    saved activations: until their last reader
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ..ir.aliases import storages_of, tensors_of
from .memory import live_bytes, saved_inputs


@dataclass(frozen=True)
class Weight:
    """The bytes that one rank holds."""

    forward: tuple[int, ...]  # at each node, without inputs that stay
    backward: tuple[int, ...]
    held_bytes: int  # from begin to end: the callers' inputs
    returned_bytes: int  # while backward runs: what forward returned, and its caller may hold
    given_up: tuple[str, ...]  # inputs of backward that their last readers free

    @property
    def peak_bytes(self) -> int:
        backward = self.returned_bytes + max(self.backward, default=0)
        return self.held_bytes + max(*self.forward, backward)


def weigh(forward: fx.Graph, backward: fx.Graph, num_results: int, fused: bool = True) -> Weight:
    """Weigh two lowered halves; behind its ``num_results`` results, forward returns what backward takes."""
    first, held_bytes = live_bytes(forward, fused=fused)
    storages = storages_of(forward)
    results = [storages[one] if isinstance(one, fx.Node) else () for one in results_of(forward)]
    made = {one for these in results[:num_results] for one in these if one.node.op == "call_function"}
    # A saved tensor that shares memory with an input or a result of forward is the caller's while backward runs.
    callers = {
        name
        for name, these in zip(taken_as(forward, backward, num_results), results[num_results:])
        if any(one in made or one.node.op == "placeholder" for one in these)
    }
    given_up = tuple(name for name in saved_inputs(backward) if name not in callers)
    then, _ = live_bytes(backward, given_up, fused=fused)
    return Weight(first, then, held_bytes, sum(one.num_bytes for one in made), given_up)


def saved_by(forward: fx.Graph, backward: fx.Graph) -> int:
    """Return how many results of a forward graph come before what its backward takes."""
    return max(len(results_of(forward)) - len(_saved(backward)), 0)


def results_of(graph: fx.Graph) -> tuple[object, ...]:
    """Return the results of a graph."""
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return tuple(results)


def taken_as(forward: fx.Graph, backward: fx.Graph, num_results: int) -> list[str]:
    """Return backward's name for each value that forward saves: forward has tensors first, backward sizes."""
    saved = [one if isinstance(one, fx.Node) else None for one in results_of(forward)[num_results:]]
    taken = _saved(backward)
    names = {one.name for one in taken}
    if all(one is None or one.name in names for one in saved):
        return ["" if one is None else one.name for one in saved]
    # Inductor's passes rename what forward returns.
    tensors, sizes = iter(_by_kind(taken, True)), iter(_by_kind(taken, False))
    return [next(tensors if one is not None and tensors_of(one) else sizes, "") for one in saved]


def _saved(backward: fx.Graph) -> list[fx.Node]:
    inputs = backward.find_nodes(op="placeholder")
    return [one for one in inputs if not one.name.startswith(("tangents", "bwd_"))]


def _by_kind(nodes: Sequence[fx.Node], are_tensors: bool) -> list[str]:
    return [one.name for one in nodes if bool(tensors_of(one)) == are_tensors]
