"""What code finds that was written for FSDP2: handles to wait on, and the state behind the public methods.

torch.distributed.pipelining looks for that state: on 2.11 it runs the end of a backward through its private methods, on
2.15 it compares the identity of communication contexts. torch's own ``register_fsdp_forward_method`` calls the state
around the method, and its ``share_comm_ctx`` assigns the context of one state to the others. An ``FSDP2View`` stands
where they look for FSDP2's state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._torch_compat import dynamo, fsdp2
from ..core.unit import STATE, Unit
from ..eager.around import begin, end
from ..eager.backward import end_backward
from ..eager.gathered import Gathered
from ..eager.reduction import Traffic
from ..eager.running import Use, is_here, running
from .unit_forward import cast_inputs, cast_outputs


class Managed:
    """Whether ranks wait for one another in a module's forward: transformers asks, and keeps ``generate`` in step.

    A framework may set it itself, as transformers does on a model that it has sharded. Dynamo always reads False: with
    True, it leaves out guards or refuses the module. From torch 2.14 on, Dynamo reads this object off the class, not
    the module's own dict, since an attribute that can be set comes first.
    """

    def __bool__(self) -> bool:
        return False

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        module.__dict__.pop(self.name, None)

    def __set_name__(self, cls: type, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, cls: type) -> Any:
        if module is None:
            return self
        if torch.compiler.is_compiling() or dynamo.is_tracing():
            return False
        if self.name in module.__dict__:
            return module.__dict__[self.name]
        unit: Unit = module.__dict__[STATE]
        return unit.mesh.num_shards > 1 and not all(map(is_here, unit.inside()))


class UnshardHandle(fsdp2.UNSHARD_HANDLE):  # type: ignore[misc, valid-type]  # by name alone, as FSDPModule is
    """The handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered

    def wait(self) -> None:
        """Wait until the parameters are gathered; a forward does so by itself."""
        self._gathered.land()


class GradientReductionHandle(fsdp2.GRADIENT_REDUCTION_HANDLE):  # type: ignore[misc, valid-type]
    """The handle of ``finalize_backward(async_op=True)``: wait before the next forward and the optimizer's step."""

    def __init__(self, root: Unit) -> None:
        self._root: Unit | None = root

    def wait(self) -> None:
        """Wait until the shards have their gradients."""
        if self._root is None:
            return
        iteration = running(self._root).iteration
        if iteration.pending_handle is not self:
            raise RuntimeError(
                "This gradient reduction handle was invalidated: reset_iter_state() dropped its gradients. Run the "
                "step anew."
            )
        iteration.traffic.finish()
        iteration.pending_handle = None
        self._root = None


class FSDP2View:
    """One unit, with the methods and attributes of FSDP2's state."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._use: Use | None = None  # an eager one, between the two ends of a forward

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast the inputs and gather, before code that is not ours calls the unit's module."""
        self._use = None
        args, kwargs = cast_inputs(self._unit, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return args, kwargs
        reads_are_compiled = dynamo.is_at_work() or dynamo.forward_is_compiled(module)
        self._use, args, kwargs = begin(self._unit, module, args, kwargs, reads_are_compiled)
        self._use.ends_with_errors = False
        return args, kwargs

    def _post_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Free or keep the parameters, and cast the outputs, after such code has called the module."""
        use, self._use = self._use, None
        if use is not None:
            output = end(self._unit, module, use, output)
        return cast_outputs(self._unit, output)

    @property
    def _state_ctx(self) -> FSDP2View:
        return self

    @property
    def all_states(self) -> list[FSDP2View]:
        """Return the states of the iteration; one is enough, since the end of backward looks at every unit."""
        return [self]

    @property
    def _comm_ctx(self) -> Traffic:
        return running(self._unit).iteration.traffic

    @_comm_ctx.setter
    def _comm_ctx(self, traffic: Traffic) -> None:
        running(self._unit).iteration.traffic = traffic

    comm_ctx = _comm_ctx  # its name in a parameter group

    _fsdp_param_group = _state_ctx
    _fsdp_param_groups = all_states

    def post_backward(self, *unused: Any) -> None:
        """Do nothing: the end of backward reduces what backward did not."""

    def _root_post_backward_final_callback(self) -> None:
        root = self._unit.root
        running(root).iteration.is_last_backward = root.settings.is_last_backward = True
        end_backward(root)


# They run as frames where torch's method around a user's does so; where Dynamo inlines that, it inlines them.
dynamo.leave_to_python(FSDP2View._pre_forward)
dynamo.leave_to_python(FSDP2View._post_forward)
