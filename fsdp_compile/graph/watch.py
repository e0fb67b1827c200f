"""One guard for all parameters of a unit: whether what a graph assumed about them still holds.

    traced read      a unit's UnitWatch --reads(fqn)--> the code of the read (reading.py): what the graph takes of the
                                                        parameter, and what becomes of its gradient
                                        --spec(fqn)---> what its marker says: a constant, which needs no guard
    each call        UnitWatch.seen() == what it was when the graph was traced, else Dynamo looks for another graph

A DTensor that Dynamo sees costs 5 microseconds a call in guards, most of it for comparing its spec in Python. With a
watch Dynamo sees none: the graph takes the shard's edge, its local tensor as autograd sees it, from beside the shard.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from .._torch_compat import autograd, dtensors, dynamo, traced_frames
from ..core import left
from ..core.captures import refuse_traced
from ..core.param import ReadSpec, ShardedParam, Slot
from ..core.shared import shared
from ..core.stored import wrapper
from ..core.unit import Unit
from .extension import extended_gather
from .reading import DTENSOR, EDGE, LOCAL, MESH, Reading, code_of, frozen, given_to_graphs, registered, trained

# What a graph takes of a parameter: the full one, if the eager path runs around the graph and gives it; the local
# tensor of a frozen one; its edge, which is the local tensor; both of these; or the shard, a DTensor, if the graph has
# written to it: AOTAutograd would not know that its local tensor is another one by then.
Taken = Literal["full", "local", "edge", "both", "registered"] | None  # None: what is there is not our shard


@shared
class Specs:
    """The specs of a unit's parameters: one object for equal units, which guards compare at each call."""

    def __init__(self, *specs: ReadSpec) -> None:
        self.specs = specs

    def __deepcopy__(self, memo: dict[int, Any]) -> Specs:
        return self  # Dynamo keeps a copy of what a guard has seen


class UnitWatch(dynamo.OpaqueBase):  # type: ignore[misc]
    """What a unit's compiled reads ask before they take anything of a shard; a guard compares ``seen`` at each call."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)  # weak, since Dynamo keeps watches
        self._was_asked = False
        self.joins_in: int | None = None  # the last backward that came through a part of the unit's edges
        self._said: set[str] = set()  # warnings that were given in the model of which this unit is the root
        self.specs: Any = None  # made again when a guard asks after a change

    @property
    def unit(self) -> Unit:
        """The unit; whoever asks for more than ``seen`` keeps it alive."""
        unit = self._unit()
        assert unit is not None
        return unit

    def seen(self) -> list[Any]:
        """Return all that the answers below depend on. It changes nothing, since guards may run at any time."""
        unit = self._unit()
        if unit is None:
            return []
        if self.specs is None:
            self.specs = Specs(*(param.sink.spec for param in unit.params))
        with autograd.quick_attributes():
            seen: list[Any] = [_taken(unit, param, slot) for param in unit.params for slot in param.slots]
            seen.append(self.specs)
            if unit.given is not None:
                return seen  # the eager path reduces gradients
            seen += [param.apart.names for param in unit.params if param.apart is not None]
        replicated = {param.mesh.num_replicas > 1 for param in unit.params}
        return [*seen, *(unit.accumulation.mode_of(one) for one in sorted(replicated))]

    def reads(self, fqn: str, name: str) -> Callable[..., Any] | None:
        """Return the function that reads a module's parameter ``name``; None if the user put something else there."""
        taken = self._takes(fqn)
        if taken is None:
            return None
        if taken == "full":
            return given_to_graphs(name)
        return code_of(name, self._reading(fqn, self._arguments(fqn, taken)))

    def reads_registered(self, fqn: str, name: str, is_traced: bool) -> Callable[..., Any]:
        """Return the function that reads it from a shard that is registered, also where no graph is traced."""
        return code_of(name, self._reading(fqn, registered(self.unit.mode_of(self._param(fqn))), is_traced))

    def _reading(self, fqn: str, arguments: str, is_traced: bool = True) -> Reading:
        param = self._param(fqn)
        mesh = MESH if dtensors.MESH_IS_GRAPH_INPUT else "None"
        return Reading(
            arguments,
            is_traced,
            is_extended=param.sink.spec.extension is not None,
            wraps_on="" if param.dtensor is None else mesh,
            is_in_front=dynamo.is_in_body_apart(),
            enables_grad=not torch.is_grad_enabled() and self.records(),
            carried=tuple(param.carried),
        )

    def _arguments(self, fqn: str, taken: Taken) -> str:
        """Return a marker's first arguments, as code."""
        param, local = self._param(fqn), LOCAL
        if param.apart is not None:
            names = param.apart.names
            local = f"({names!r}, {', '.join(f'{LOCAL}[{name!r}]' for name in names)})"
        if taken in ("local", "registered"):
            return frozen(local if taken == "local" else DTENSOR)
        edge = None if param.sink.edge is None else EDGE
        return trained(self.unit.mode_of(param), local, edge, DTENSOR, edge_is_local=taken == "edge")

    def _takes(self, fqn: str) -> Taken:
        """Return what graphs take of a parameter; None if the user put something else in its place, or into it."""
        dynamo.hide_looks_at_grad()
        unit, param = self.unit, self._param(fqn)
        refuse_traced(fqn, unit.mode_of(param))
        param.require_shard()
        left.settle()
        if autograd.uses_compiled_autograd():
            param.sink.have_leaf()
        for around in (unit, *unit.around()):
            if around.given is not None:  # the unit with ``given`` may have no parameters
                around.watch.say_no_plan(
                    "is compiled by itself, or in parts: the eager path gathers and reduces around its graphs, as "
                    "reshard_after_forward and the prefetch settings say"
                )
                break
            around.watch._was_asked = True
            around.watch.say_unheeded()
        if dynamo.traces_backward():
            return None  # gradients must reach leaves of the graph: the DTensor itself, and not its edge
        if _was_replaced(param):
            return None  # by torch.func.functional_call inside what is compiled
        taken = [_taken(unit, param, slot) for slot in param.slots]
        if None in taken:
            return None
        if taken[0] == "full":
            dynamo.note_free_to_save()
        elif dynamo.num_writes_traced(param.shard):
            return "registered"
        return taken[0]

    def replaced(self) -> tuple[int, ...]:
        """Indices in ``unit.params`` of the parameters in whose places traced code registered something else."""
        return tuple(place for place, param in enumerate(self.unit.params) if _was_replaced(param))

    def spec(self, fqn: str) -> str:
        """Return what the marker says of the parameter, a constant of the graph."""
        return self._param(fqn).sink.spec.text  # type: ignore[no-any-return]

    def dtype(self, fqn: str) -> torch.dtype:
        """Return the dtype that the unit computes in."""
        return self._param(fqn).sink.spec.dtype  # type: ignore[no-any-return]

    def gather(self, fqn: str) -> Callable[..., Any] | None:
        """Return the function that a read calls in place of the marker if the parameter has an all-gather extension."""
        spec: ReadSpec = self._param(fqn).sink.spec
        return None if spec.extension is None else extended_gather(spec)

    def wrap(self, fqn: str) -> Callable[..., DTensor] | None:
        """Return the function that makes a DTensor of what is gathered, if the parameter was one before fully_shard."""
        dtensor = self._param(fqn).dtensor
        return None if dtensor is None else wrapper(dtensor)

    def records(self) -> bool:
        """Whether a read under ``no_grad`` is recorded: a training forward may use the tensor outside of it as well."""
        run = self.unit.running
        uses = [] if run is None else run.uses  # some, if a graph broke
        return bool(uses[-1].records) if uses else dynamo.traces_with_grad()

    def keep(self, fqn: str, local: str) -> None:
        """Make what a read gave an ``nn.Parameter``, and have later reads in the same graph give it again."""
        traced_frames.keep_local(self._read(fqn), local)

    def gives_again(self, fqn: str, local: str) -> bool:
        """Whether the graph has read the parameter before; if so, set the variable ``local`` to what it was given."""
        return traced_frames.give_again(self._read(fqn), local)

    def gave(self, fqn: str, local: str) -> bool:
        """Whether the variable ``local`` is what a read of the parameter gave the graph."""
        return traced_frames.was_kept(self._read(fqn), local)

    def _read(self, fqn: str) -> Any:
        """Return what two reads have in common if they give one tensor: parameter, call, modes, writes before."""
        param = self._param(fqn)
        registered = traced_frames.node_of("param")  # of a read for which ``takes`` returned None
        has_grad = torch.is_grad_enabled() or self.records()
        call = traced_frames.calls_of(self.unit.modules)
        modes = has_grad, traced_frames.in_inference_mode()
        return param, registered, call, modes, dynamo.num_writes_traced(param.shard)

    def note_data(self) -> None:
        """Have the eager path gather anew, into other storages, since a shard has other memory."""
        unit = self._unit()
        if unit is not None:
            unit.version += 1

    def say_unheeded(self) -> None:
        """Warn of settings that only the eager path uses, once each in a model, if graphs have read parameters."""
        unit = self.unit
        if not self._was_asked:
            return
        said: set[str] = unit.root.watch._said
        new = [name for name in unit.unheeded_in_graphs if name not in said]
        if new:
            said.update(new)
            warnings.warn(
                f"{', '.join(new)} has no effect where {unit.name} is compiled: there compiler passes decide when to "
                "gather, reduce and free. It holds where the module runs eagerly, or is compiled by itself in a model "
                "that does.",
                stacklevel=2,
            )

    def say_no_plan(self, why: str) -> None:
        """Warn, once in a model, that a plan or budget has no effect: no graph gathers and reduces for this unit."""
        unit = self.unit
        said: set[str] = unit.root.watch._said
        if unit.settings.plan and "plan" not in said:
            said.add("plan")
            warnings.warn(
                f"memory_budget or plan has no effect where {unit.name} {why}. Compile the whole model to have it "
                "planned.",
                stacklevel=2,
            )

    def say_no_plan_eagerly(self) -> None:
        """Warn of that in the model of which this unit is the root, unless a graph has read one of its parameters."""
        if not self._was_asked:
            for inner in self.unit.inside():
                inner.watch.say_no_plan("runs eagerly: it gathers and reduces as reshard_after_forward says")

    def _param(self, fqn: str) -> ShardedParam:
        return self.unit.by_fqn[fqn]

    def begin_in_front(self) -> None:
        """Gather in front of a branch or a loop that the read is in, as the eager path does.

        Otherwise a rank that does not take the branch would not gather, and the ranks that do would wait for it.
        """
        dynamo.begin_in_front()

    def end_in_front(self) -> None:
        dynamo.end_in_front()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitWatch:
        return self  # Dynamo of torch 2.11 keeps a copy


def _was_replaced(param: ShardedParam) -> bool:
    """Whether traced code wrote to a dict in which the parameter is registered."""
    return any(dynamo.changed_while_traced(slot.module._parameters) for slot in param.slots)


def _taken(unit: Unit, param: ShardedParam, slot: Slot) -> Taken:
    registered = slot.param
    if unit.given is not None:
        return "full" if registered is param.param and param.is_cut(registered) else None
    if registered is not param.shard or param.has_other_data:
        return None
    return param.sink.takes if registered.requires_grad else "local"


_ASKED = ("reads", "reads_registered", "replaced", "spec", "dtype", "gather", "wrap")
# A frame of the user's that Dynamo gave up on may call these in Python.
dynamo.leave_all_to_python(UnitWatch.keep, UnitWatch.gives_again, UnitWatch.gave)
_WHERE = ("keep", "gives_again", "begin_in_front", "end_in_front")  # these depend on where the read is
dynamo.register_opaque(UnitWatch, guard=UnitWatch.seen, constant_methods=_ASKED + _WHERE)
