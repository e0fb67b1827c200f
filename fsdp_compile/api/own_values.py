"""Has modules initialize themselves, in the right order, with whole tensors in the place of their shards.

    init_fn, reset_parameters   each module with missing tensors, from outside in
    _init_weights               inside out, as Hugging Face's models apply it: a module around it may overrule it
    a shard, a DTensor          --whole--> the call writes to a plain tensor --own part--> the shard

``_init_weights`` of a module may write to modules inside it. A call on meta tensors first finds out what it writes to,
so that only that is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ..core.mesh import device_of_type
from ..core.param import ShardedParam, Slot
from ..core.parts import write_part
from ..core.unit import Unit, original_class
from .auto_shard import inside_out
from .classes import read_by
from .exchange import gathered
from .fitting import mark_unwritten, raise_on_all
from .full_params import in_place_of_shards

INITIALIZES = "_init_weights"  # a convention of models, Hugging Face's among them
Step = tuple[nn.Module, frozenset[Slot]]  # the module to initialize, and the parameters that the call writes to


class Own:
    """Has a module initialize itself, and then the innermost model around it with ``_init_weights`` initialize it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._around: dict[nn.Module, nn.Module] = {}
        for one in model.modules():
            if callable(getattr(one, INITIALIZES, None)):
                self._around.update(dict.fromkeys(one.modules(), one))

    def knows(self, module: nn.Module) -> bool:
        return module in self._around or callable(getattr(module, "reset_parameters", None))

    def __call__(self, module: nn.Module) -> None:
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]
        self.as_part(module)

    def as_part(self, module: nn.Module) -> None:
        if module in self._around:
            getattr(self._around[module], INITIALIZES)(module)

    def steps(self, modules: Collection[nn.Module], missing: Collection[Slot]) -> Iterator[Step]:
        """Yield the calls: for ``modules``, which have missing tensors, and for others that write only to such."""
        for module in modules:
            if module not in self._around:
                yield module, own_slots(module)
        for module in inside_out(self._model):
            if module in self._around:
                written = _foreseen(self, module)
                if module in modules:
                    yield module, own_slots(module) | written
                elif written and written <= frozenset(missing):
                    yield module, written


def own_slots(module: nn.Module) -> frozenset[Slot]:
    return frozenset(Slot(module, name) for name, param in module._parameters.items() if param is not None)


class _Writes(TorchFunctionMode):
    """Notes which of some tensors are written to, also through tensors that are made from them."""

    def __init__(self, slots: dict[int, list[Slot]]) -> None:
        super().__init__()
        self._of, self._alive, self.written = slots, list[Tensor](), set[Slot]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of = [slot for one in (*args[:1], *kwargs.values()) for slot in self._of.get(id(one), ())]
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            self.written.update(of)
        if of and isinstance(result, Tensor):
            self._alive.append(result)  # so that no other tensor gets its id
            self._of.setdefault(id(result), of)
        return result


def _foreseen(own: Own, module: nn.Module) -> frozenset[Slot]:
    """Return the parameters inside ``module`` that its ``_init_weights`` writes to, by a call on meta tensors."""
    registered = {slot: slot.param for one in module.modules() for slot in own_slots(one)}
    if all(slot.module is module for slot in registered):
        return frozenset()  # nothing inside
    stand_ins: dict[int, nn.Parameter] = {}
    slots: dict[int, list[Slot]] = {}
    for slot, param in registered.items():
        on_meta = torch.empty(param.shape, dtype=param.dtype, device="meta")
        stand_in = stand_ins.setdefault(id(param), nn.Parameter(on_meta, param.requires_grad))
        slots.setdefault(id(stand_in), []).append(slot)
    writes = _Writes(slots)
    try:
        for slot, param in registered.items():
            slot.register(stand_ins[id(param)])
        with torch.random.fork_rng(devices=()), torch.no_grad(), writes:
            own.as_part(module)
    except (NotImplementedError, RuntimeError):  # it reads values, so it may write to all of them
        return frozenset(registered)
    finally:
        for slot, param in registered.items():
            slot.register(param)
    return frozenset(writes.written)


@torch.no_grad()
def initialize_all(
    units: list[Unit], steps: list[Step], missing: Sequence[Slot], initialize: Callable[[nn.Module], Any]
) -> None:
    """Make the calls, each with full parameters; raise an error of one on every rank, after the last gather.

    Gathering is a collective: ``units`` and ``missing`` are in the same order on every rank. A missing parameter has no
    values to gather before its module, or a module around that, was called. (A user's function may write anywhere, so
    then all are gathered.)
    """
    order = {slot: index for index, slot in enumerate(missing)}
    had: set[nn.Module] = set()
    failed: Exception | None = None
    where = ""

    def units_used(step: Step) -> tuple[list[Unit], nn.Module | None]:
        module, written = step
        used = read_by(module, *(slot.module for slot in written))
        return [unit for unit in units if unit in used], None if used else module

    def has_values(slot: Slot) -> bool:
        return not isinstance(initialize, Own) or slot not in order or slot.module in had

    for (its, _), some in itertools.groupby(steps, units_used):
        calls, sharded = list(some), [param for unit in its for param in unit.params]
        slots: dict[Any, list[Slot]] = {param.param: [*param.slots] for param in sharded}
        written = {slot for _, its_slots in calls for slot in its_slots if slot in order}
        for slot in sorted(written, key=order.__getitem__):
            if isinstance(slot.param, DTensor) and slot not in slots.setdefault(slot.param, []):
                slots[slot.param].append(slot)
        with _whole(slots, sharded, has_values):
            for module, _ in calls:
                if failed is None:
                    try:
                        initialize(module)
                    except Exception as error:
                        failed, where = error, f"in {original_class(module).__name__}: "
                had.update(module.modules())
    raise_on_all("materialize", failed, where)


@contextmanager
def _whole(
    slots: dict[Any, list[Slot]], sharded: Sequence[ShardedParam], has_values: Callable[[Slot], bool]
) -> Iterator[None]:
    """Put plain tensors in the place of DTensors, whose random numbers would be alike on every rank of their mesh."""
    known = [tensor for tensor, its in slots.items() if any(map(has_values, its))]
    values = dict(zip(known, gathered((slots[one][0].name, one) for one in known), strict=True))
    fulls = {}
    for tensor in slots:
        if tensor not in values:
            device = device_of_type(tensor.device_mesh.device_type)
            values[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            mark_unwritten(values[tensor])
        fulls[tensor] = nn.Parameter(values[tensor], tensor.requires_grad)
    with in_place_of_shards({param: fulls[param.param] for param in sharded}):
        for tensor, full in fulls.items():
            for slot in slots[tensor]:
                slot.register(full)
        try:
            yield
        finally:
            for tensor, full in fulls.items():
                put = next((slot.param for slot in slots[tensor] if slot.param is not full), full)
                if put.shape != tensor.shape:
                    raise RuntimeError(
                        f"materialize: {slots[tensor][0].name} has shape {tuple(tensor.shape)}, and was given one of "
                        f"{tuple(put.shape)} where its module initializes itself. Keep its shape."
                    )
                write_part(tensor, put)
                tensor.requires_grad_(put.requires_grad)
                for slot in slots[tensor]:
                    slot.register(tensor)
