"""Any optimizer on whole tensors: a rank owns each parameter, and has an optimizer of the user's class for it.

    shards and gradients  -> exchange to the owners -> the class's own step -> exchange back ->  shards

So optimizers that look at a whole matrix (SOAP, Shampoo, Adafactor) have the numbers of the unsharded model. The state
of a parameter is on its owner alone. For checkpoints it is cut into rows, as DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch_compat.optimizers import step_without_hooks
from ..core.containers import map_tensors
from ..core.parts import local_of
from .owners import Owners, owners_device
from .updating import UpdatingOptimizer, group_settings


class WholeTensorOptimizer(UpdatingOptimizer):
    """An optimizer of ``optimizer_class``, which sees each parameter of a sharded model whole, on one rank.

    ``settings`` are those of the class, and groups may have their own. ``cost`` weighs a shape, to share the work out.
    What the class computes of one parameter must not depend on others. All ranks make it together, call ``step`` with
    gradients of the same parameters, and call ``state_dict`` and ``load_state_dict`` together.
    """

    _copied = ("_make", "_cost", "_settings", "_owners")

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        cost: Callable[[torch.Size], float] | None = None,
        **settings: Any,
    ) -> None:
        self._make, self._cost, self._settings = optimizer_class, cost or _cost, settings
        self._owners: list[Owners] = []  # of the parameters that were new at a step
        self._without_grads: Optimizer | None = None
        super().__init__(params, {})
        self._begin()
        self._take_settings(len(self.param_groups))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_make" in state:  # a copy: optimizers of the class may not be copied (pytorch_optimizer's lose attributes)
            self._begin()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; all ranks call this together."""
        super().add_param_group(param_group)
        if self._without_grads is not None:  # it is None while torch's constructor adds the first ones
            self._without_grads.add_param_group(_stand_ins(self.param_groups[-1]))
            self._take_settings(1)

    def _update(self) -> None:
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        for owners in self._shared_out():

            def compute(places: Sequence[int], wholes: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
                updated = [owners.params[place] for place in places]  # noqa: B023
                return [self._updated(*one, group_of[one[0]]) for one in zip(updated, wholes, grads)]

            parts = [None if param.grad is None else local_of(param) for param in owners.params]
            grads = [None if param.grad is None else local_of(param.grad) for param in owners.params]
            for param, part, result in zip(owners.params, parts, owners.run(compute, parts, grads)):
                if part is not None and result is not None:
                    part.copy_(result)
                    self._show_state(param)
        assert self._without_grads is not None
        for inner, group in zip(self._without_grads.param_groups, self.param_groups):
            inner.update(group_settings(group))
        step_without_hooks(self._without_grads)
        self._take_settings(len(self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; the owners' tensors come as DTensors, cut into rows over all ranks."""
        published = {}
        for owners in self._shared_out():
            mine = [(place, owners.params[place]) for place in owners.mine]
            held = owners.publish({place: self.state[param] for place, param in mine if param in self.state})
            published.update({owners.params[place]: state for place, state in held.items()})
        params = [param for group in self.param_groups for param in group["params"]]
        state = {number: published[param] for number, param in enumerate(params) if param in published}
        return {**super().state_dict(), "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned on any number of ranks, or that of ``optimizer_class`` without sharding."""
        self._shared_out()
        known = self.state
        super().load_state_dict({**state_dict, "state": {}})
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (param, group) in zip(numbers, params):
            state = {}
            if number in state_dict["state"]:
                # torch's set_optimizer_state_dict leaves out lists without tensors, which SOAP has (2.11 to 2.15).
                state = {0: {**known.get(param, {}), **map_tensors(state_dict["state"][number], _full)}}
            if param in self._owned:
                groups = [{**group_settings(group), "params": [0]}]
                self._owned[param][0].load_state_dict({"state": state, "param_groups": groups})
            if state:
                self._show_state(param)

    def _begin(self) -> None:
        # Of each parameter that this rank owns: an optimizer, and the parameter that it knows.
        self._owned: dict[Tensor, tuple[Optimizer, nn.Parameter]] = {}
        # It checks what the user gave, on all ranks alike, and its step does to groups what a step does (SOAP counts).
        self._without_grads = self._make([_stand_ins(group) for group in self.param_groups], **self._settings)
        self.defaults = self._without_grads.defaults

    def _shared_out(self) -> list[Owners]:
        """Share new parameters out, make an optimizer for each that is this rank's, and return the owners of all."""
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        known = {param for owners in self._owners for param in owners.params}
        new = [param for param in group_of if param not in known]
        if new:
            self._owners.append(Owners(new, self._cost))
        for param in (owners.params[place] for owners in self._owners for place in owners.mine):
            if param in group_of and param not in self._owned:
                stand_in = _stand_in(param)
                optimizer = self._make([{**group_settings(group_of[param]), "params": [stand_in]}], **self._settings)
                if self.state.get(param):  # of a copy
                    optimizer.state[stand_in] = self.state[param]
                self._owned[param] = optimizer, stand_in
        return self._owners

    def _updated(self, param: Tensor, whole: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Step the optimizer of one parameter; return its new value."""
        optimizer, stand_in = self._owned[param]
        optimizer.param_groups[0].update(group_settings(group))
        stand_in.data = whole
        if grad.dtype != whole.dtype:
            stand_in.grad_dtype = grad.dtype
        stand_in.grad = grad
        step_without_hooks(optimizer)
        whole = stand_in.data
        stand_in.data, stand_in.grad = whole.new_empty(0), None
        return whole

    def _take_settings(self, num_groups: int) -> None:
        """Have the last groups say what those of the class say."""
        assert self._without_grads is not None
        for inner, group in zip(self._without_grads.param_groups[-num_groups:], self.param_groups[-num_groups:]):
            group.update(group_settings(inner))

    def _show_state(self, param: Tensor) -> None:
        """Have ``self.state`` say on all ranks that a parameter has one; elsewhere it is empty."""
        self.state[param] = {}
        if param in self._owned:
            optimizer, stand_in = self._owned[param]
            self.state[param] = optimizer.state[stand_in]


def _stand_ins(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group_settings(group), "params": [_stand_in(param) for param in group["params"]]}


def _stand_in(param: Tensor) -> nn.Parameter:
    """Return a parameter of the whole shape with the memory of one element; a step puts the whole in its place."""
    element = torch.zeros((), dtype=param.dtype, device=owners_device(param))
    return nn.Parameter(element.expand(param.shape), param.requires_grad)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _cost(size: torch.Size) -> float:
    """Return the multiplications by a square matrix on each side."""
    return float(size.numel() * sum(size))
