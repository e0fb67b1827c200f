"""Why a parameter is kept from forward to backward, gathered again, or not needed there.

    y  = addmm(b0, x, t(w0))      w0, b0   not needed   frozen, and x takes no gradient: none comes to their unit
    z  = addmm(b1, y, t(w1))      b1       again        its unit is gathered again
    gy = mm(gz, w1)               w1       again        a gradient reads it

The decision is the plan's (plan.py); this says what it followed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ..ir.markers import change_spec, spec_in
from ..ir.nodes import copied, passes_on, readers_of
from ..ir.phases import is_backward
from ..ir.plan import Plan
from ..ir.provenance import unshard_nodes, whole_of
from .slices import is_sliced
from .structure import RECOMPUTED, Structure, structure_of

KEPT, AGAIN, UNNEEDED = "kept", "gathered again", "not needed"

FROM_SLICES = "from the slices that are kept"

TOLD = "reshard_after_forward"  # what the unit was told, or the default
BUDGET = "memory budget"
GIVEN = "given plan"


@dataclass(frozen=True)
class Residency:
    """What becomes of one parameter behind forward."""

    becomes: str  # KEPT, AGAIN or UNNEEDED
    why: str


def residency_of(joint: fx.Graph, names: Sequence[str], plan: Plan, decided_by: str) -> dict[str, Residency]:
    """Of each parameter of a joint graph, as it was before ``keep``, by its name in the plan.

    ``names`` are those of the graph's gathers, in its order; ``decided_by`` is TOLD, BUDGET or GIVEN.
    """
    graph = copied(joint)
    gathers = unshard_nodes(graph)
    told = [spec_in(node).regather for node in gathers]
    for node in gathers:
        change_spec(node, regather=True)
    structure = structure_of(graph)
    made = {node for node in structure.of_weights if node not in set(gathers) and not passes_on(node)}
    keep, again = {*plan.keep}, {*plan.again}
    found = {}
    for name, node, resharded in zip(names, gathers, told, strict=True):
        if name in keep:
            found[name] = Residency(KEPT, f"{TOLD}=False" if decided_by == TOLD else decided_by)
        elif name in again:
            by = "" if decided_by == TOLD else f"{decided_by}; "
            if decided_by == TOLD and not resharded:
                by = "forward does not read it; "
            found[name] = Residency(AGAIN, by + _why_needed(node, structure, made))
        else:
            found[name] = Residency(UNNEEDED, _why_not(node))
    return found


def residency_of_whole(plan: Plan) -> dict[str, Residency]:
    """Of a step that is one graph: there what was told is done, where backward reads it."""
    in_forward = [fqn for bucket in plan.gathers if not is_backward(bucket.phase) for fqn in bucket.fqns]
    found = {fqn: Residency(UNNEEDED, "backward does not read it") for fqn in in_forward}
    found |= {fqn: Residency(AGAIN, "backward reads it") for fqn in plan.again}
    return found | {fqn: Residency(KEPT, f"{TOLD}=False") for fqn in plan.keep}


def _why_needed(gather: fx.Node, structure: Structure, made: set[fx.Node]) -> str:
    if whole_of(gather) is not None:
        return FROM_SLICES
    readers = [user for user in readers_of(gather, passes_on) if user.op == "call_function"]
    if any(user in made for user in readers):
        return "what is made of it is made again"
    if any(user.meta.get("recompute") in RECOMPUTED for user in readers):
        return "a checkpointed region reads it"
    return "a gradient reads it" if any(user in structure.fed for user in readers) else "its unit is gathered again"


def _why_not(gather: fx.Node) -> str:
    if is_sliced(gather):
        return "a slice of it is kept"
    return "its rows are looked up" if spec_in(gather).is_table else "no gradient comes to its unit"
