"""Keep optimizer states in the host's memory; a step has them on the device while it updates their parameters.

    to the device      states 0 | states 1 | states 2
    current stream              | step 0   | step 1   | step 2
    to the host                            | states 0 | states 1 | states 2

The optimizer's own class computes on the device, so the numbers are those of the class, and a step takes as long as the
copies do. Offloaded shards and their gradients (CPUOffloadPolicy) are copied there with their states. The class gets
another parameter in the place of each, with the same attributes, and what it makes of that is copied back.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch_compat import dtensors, subclasses
from .._torch_compat.optimizers import step_without_hooks
from ..core.containers import map_tensors, tensors_in
from ..core.parts import local_of
from ..passes.apply.away import LEAST_BYTES
from ..passes.budget.budget import bytes_of
from ..passes.wire import copies, streams
from .owners import owners_device
from .updating import UpdatingOptimizer, group_settings


class StatesOnHost(UpdatingOptimizer):
    """Runs an optimizer of ``optimizer_class``, and keeps its states in the host's memory between steps.

    ``keep`` are the bytes of states that stay on the device (an int, or text such as ``"4GiB"``): those of the first
    parameters. ``configure(model, memory_budget=..., may=(..., "offload"), optimizer=this)`` has the budget choose them
    instead. ``settings`` are those of the class, and groups may have their own. What the class computes of one
    parameter must not depend on others. Groups and state dicts are those of the class.
    """

    _copied = ("_make", "_settings", "_keep", "_away")
    _least_bytes = LEAST_BYTES  # of a tensor that is worth a copy
    _bucket_bytes = 64 << 20  # of the shards that one bucket updates; the device has what is copied for three buckets

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        keep: int | str = 0,
        **settings: Any,
    ) -> None:
        _require_class(optimizer_class)
        self._make, self._settings = optimizer_class, settings
        self._keep = 0 if keep == 0 else bytes_of("keep", keep)
        self._chosen: Callable[[], int | None] | None = None
        self._away: set[Tensor] = set()  # parameters whose states are on the host
        self._inner = optimizer_class(params, **settings)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.state = self._inner.state  # Adagrad has states from the begin
        self._send_now(self.state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_make" in state:  # a copy
            self._chosen = None
            groups = [{**group_settings(group), "params": group["params"]} for group in self.param_groups]
            self._inner = self._make(groups, **self._settings)

    def let_a_budget_choose(self, keep: Callable[[], int | None]) -> None:
        """From the next step on, ask this how many bytes of states stay on the device; None leaves it to ``keep``."""
        self._chosen = keep

    def state_bytes(self) -> int:
        """Return the bytes of all states that may be on the host, those of the steps to come as well."""
        found = 0
        for group in self.param_groups:
            small: dict[Any, list[float]] = {}
            for param in group["params"]:
                local, kind = local_of(param), (param.dtype, min(param.ndim, 2), owners_device(param))
                if self.state.get(param):
                    found += self._bytes_of(self.state[param])
                else:
                    if kind not in small:
                        small[kind] = self._bytes_an_element(group, *kind)
                    expected = [int(num_bytes * local.numel()) for num_bytes in small[kind]]
                    found += sum(num_bytes for num_bytes in expected if num_bytes >= self._least_bytes)
        return found

    def _bytes_an_element(
        self, group: dict[str, Any], dtype: torch.dtype, ndim: int, device: torch.device
    ) -> list[float]:
        """Return the bytes of each state for an element of a parameter, by those that the class gives a small one.

        The small one has enough elements for torchao's 8-bit states, which are float32 below 4,096 elements.
        """
        like = nn.Parameter(torch.zeros((256,) * ndim, dtype=dtype, device=device))
        like.grad = torch.zeros_like(like)
        probe = self._make([{**group_settings(group), "params": [like]}], **self._settings)
        step_without_hooks(probe)
        return [_num_bytes(one) / like.numel() for one in tensors_in(probe.state[like]) if one.ndim]

    def _update(self) -> None:
        buckets = [*self._buckets(), (0, [])]
        after = [group_settings(group) for group in self.param_groups]
        chosen = None if self._chosen is None else self._chosen()
        room = self._keep if chosen is None else chosen
        coming: list[Tensor] = []  # copies that nothing has waited for
        leaving: list[Tensor] = []
        here: dict[Tensor, Tensor] = {}  # what is updated in the place of offloaded parameters
        try:
            self._bring(*buckets[0], here, coming)
            for (number, params), following in itertools.pairwise(buckets):
                _join(coming)
                self._bring(*following, here, coming)
                its = {param: here.pop(param) for param in params if param in here}
                try:
                    after[number] = self._updated(params, its, group_settings(self.param_groups[number]))
                finally:
                    _join(leaving)  # so that the device has the states of three buckets, and not of all
                    _write_back(its, leaving)
                room = self._send(params, room, leaving)
        finally:
            _join([*coming, *leaving])
            streams.wait_on_cpu()  # whoever reads the states finds what the step wrote
        for group, said in zip(self.param_groups, after):
            group.update(said)

    def _updated(
        self, params: Iterable[Tensor], others: Mapping[Tensor, Tensor], settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Have the class update some parameters of a group, or others in their place; return what the group says then.

        Each bucket of a group begins with what the group says, and a step may count in there.
        """
        self._inner.param_groups = [{**settings, "params": [others.get(param, param) for param in params]}]
        self._inner.state = self.state
        for param, other in others.items():
            _rename(self.state, param, other)
        try:
            step_without_hooks(self._inner)
            return group_settings(self._inner.param_groups[0])
        finally:
            self._inner.param_groups = []  # else the last bucket's copies would stay
            for param, other in others.items():
                _rename(self.state, other, param)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, or the class's; the device has the states of one parameter at a time."""
        super().load_state_dict({**state_dict, "state": {}})
        self._away.clear()
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (param, group) in zip(numbers, params):
            if number in state_dict["state"]:
                self._inner.param_groups = [{**group_settings(group), "params": [param]}]
                groups = [{**group_settings(group), "params": [0]}]
                self._inner.load_state_dict({"state": {0: state_dict["state"][number]}, "param_groups": groups})
                self.state[param] = self._inner.state[param]
                self._send_now([param])

    def _buckets(self) -> Iterable[tuple[int, list[Tensor]]]:
        """Return the parameters that one part of a step updates, with the number of their group."""
        for number, group in enumerate(self.param_groups):
            bucket: list[Tensor] = []
            num_bytes = 0
            for param in group["params"]:
                num_bytes += local_of(param).nbytes
                if bucket and num_bytes > self._bucket_bytes:
                    yield number, bucket
                    bucket, num_bytes = [], local_of(param).nbytes
                bucket.append(param)
            if bucket:
                yield number, bucket

    def _bring(
        self, number: int, params: Iterable[Tensor], here: dict[Tensor, Tensor], started: list[Tensor]
    ) -> None:
        """Start to copy to the device what is not there of a group's parameters, if they have gradients."""
        for param in params:
            if param.grad is None:
                continue
            to_device = functools.partial(copies.launch_to_device, device=str(owners_device(param)))
            if _is_offloaded(param):
                here[param] = self._copy_of(param, self.param_groups[number], to_device, started)
            elif param in self._away:
                self.state[param] = self._moved(self.state[param], to_device, started)
            self._away.discard(param)

    def _copy_of(
        self, param: Tensor, group: dict[str, Any], to_device: Callable[[Tensor], Tensor], started: list[Tensor]
    ) -> Tensor:
        """Start to copy an offloaded parameter, its gradient and its states. After a load, all states are with it."""
        assert param.grad is not None
        other = nn.Parameter(_start_copy(param, to_device, started))
        vars(other).update(vars(param))
        other.grad_dtype = param.grad.dtype
        other.grad = _start_copy(param.grad, to_device, started)
        counts_there = group.get("fused") or group.get("capturable")  # else a class has the number of steps on the CPU

        def brought(state: Tensor) -> Tensor:
            is_apart = local_of(state).device == local_of(param).device and (state.ndim > 0 or counts_there)
            return _start_copy(state, to_device, started) if is_apart and _can_move(state) else state

        if param in self.state:
            self.state[param] = map_tensors(self.state[param], brought)
        return other

    def _send(self, params: Iterable[Tensor], room: int, started: list[Tensor]) -> int:
        """Start to copy states to the host, but for the first ones that there is room for; return what room is left."""
        for param in params:
            if param in self._away:
                continue
            num_bytes = self._bytes_of(self.state.get(param))
            if num_bytes <= room:
                room -= num_bytes
            else:
                self.state[param] = self._moved(self.state[param], copies.launch_to_host, started)
                self._away.add(param)
        return room

    def _send_now(self, params: Iterable[Tensor]) -> None:
        started: list[Tensor] = []
        self._send([*params], 0, started)
        _join(started)
        streams.wait_on_cpu()

    def _is_moved(self, tensor: Tensor) -> bool:
        return _can_move(tensor) and tensor.ndim > 0 and _num_bytes(tensor) >= self._least_bytes

    def _bytes_of(self, state: Any) -> int:
        return sum(_num_bytes(one) for one in tensors_in(state) if self._is_moved(one))

    def _moved(self, state: Any, copy: Callable[[Tensor], Tensor], started: list[Tensor]) -> Any:
        """Return a state with copies of its large tensors, which are added to those that were ``started``."""
        return map_tensors(state, lambda one: _start_copy(one, copy, started) if self._is_moved(one) else one)


def _start_copy(tensor: Tensor, copy: Callable[[Tensor], Tensor], started: list[Tensor]) -> Tensor:
    """Start to copy a tensor; of a subclass, the tensors inside it."""

    def launched(plain: Tensor) -> Tensor:
        started.append(copy(plain))
        return started[-1]

    local = subclasses.map_inner(launched, local_of(tensor))
    return dtensors.dtensor_like(tensor, local) if isinstance(tensor, DTensor) else local


def _write_back(others: Mapping[Tensor, Tensor], started: list[Tensor]) -> None:
    """Start to copy what was updated in the place of offloaded parameters over these."""
    for param, other in others.items():
        for written, read in zip(*(subclasses.plain_tensors_in(local_of(one)) for one in (param, other))):
            copies.launch_over(written, read)
            started.append(written)


def _rename(state: dict[Tensor, Any], param: Tensor, other: Tensor) -> None:
    if param in state:
        state[other] = state.pop(param)


def _can_move(tensor: Tensor) -> bool:
    """Whether something tells what a tensor is made of."""
    return type(local_of(tensor)) is Tensor or subclasses.is_traceable(local_of(tensor))


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes of this rank's part; for a subclass such as that of 8-bit states, of the tensors inside it."""
    return sum(plain.nbytes for plain in subclasses.plain_tensors_in(local_of(tensor)))


def _require_class(optimizer_class: Any) -> None:
    if not callable(optimizer_class):
        its = type(optimizer_class).__name__
        raise TypeError(f"optimizer_class is of {its}. Give a class, such as torch.optim.AdamW.")
    step = getattr(optimizer_class, "step", None)
    closure = None if step is None else inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"{optimizer_class.__name__} evaluates the model in its step, with all parameters, and StatesOnHost has it "
            "update a few at a time. Use it alone."
        )


def _is_offloaded(param: Tensor) -> bool:
    """Whether a shard is on the host, and its model computes elsewhere."""
    return local_of(param).device.type != owners_device(param).type


def _join(started: list[Tensor]) -> None:
    """Have the current stream wait for copies, and forget them."""
    while started:
        streams.join(started.pop())
