"""fully_shard and replicate: they group the parameters, shard them, and swap the modules' classes.

    fully_shard   shard -> all_gather -> compute, gradient -> reduce_scatter -> shard's gradient
    replicate     parameter -----------> compute, gradient -> all_reduce -----> parameter's gradient

``replicate`` has the same machinery with one shard: the same graphs, buckets, casts and methods.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from .._torch_compat import dynamo, fsdp2
from ..core.extension import has_extension
from ..core.left import note_sharded
from ..core.mesh import ShardMesh, inner_mesh, replicate_mesh, shard_mesh
from ..core.param import READS, STAMP, Cut, ShardedParam, Slot, cut_of, shard_param
from ..core.settings import Settings
from ..core.spec import protocol_of
from ..core.undo import all_or_nothing
from ..core.unit import STATE, Ends, Unit, original_class, unit_of, units_in
from ..eager.backward import clean_up_at_end, note_reduction, reduce_now
from ..eager.running import running
from ..graph.install import install_passes
from ..graph.watch import UnitWatch
from ..lookout.lookout import lookout
from .arguments import fqns_in, ignored_in, modules_in, require_kinds
from .classes import parts_of, refresh
from .compiled import stand_before, stand_before_wrappers
from .fsdp2_view import FSDP2View
from .module import FSDPModule

logger = logging.getLogger("fsdp_compile")

ENDS = Ends(at_end=clean_up_at_end, now=reduce_now, note_reduction=note_reduction)

ModuleT = TypeVar("ModuleT", bound="nn.Module | list[nn.Module] | tuple[nn.Module, ...]")


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> ModuleT:
    """Shard over ``mesh``, in place, the parameters of ``module`` that no earlier call claimed; return ``module``.

    Call it bottom-up: on each block, then on the whole. One call is one unit: its parameters are gathered together
    before they are used and freed after it. With a list of modules, they form one unit.
    """
    given = modules_in(module, "fully_shard")
    _validate_reshard(reshard_after_forward)
    require_kinds("fully_shard", mesh, mp_policy, offload_policy, shard_placement_fn)
    ignored = ignored_in("fully_shard", ignored_params)
    target = shard_mesh(mesh, dp_mesh_dims)
    if not target.group and shard_placement_fn is not None:
        raise ValueError(
            f"shard_placement_fn was given, but dp_mesh_dims={dp_mesh_dims} only replicates. Name a dimension to shard "
            "over, or leave out shard_placement_fn."
        )
    make_unit(
        given, target, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy, ignored
    )
    return module


fully_shard.state = fsdp2.fsdp2_state  # type: ignore[attr-defined]  # as torch's has it


def replicate(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> ModuleT:
    """Average the gradients of ``module`` over the ranks of ``mesh``, all of which hold all parameters; return it.

    It does what ``DistributedDataParallel`` does, and ``torch.compile`` traces it. Parameters become ``Replicate()``
    DTensors. They are taken to be equal on every rank already: nothing is broadcast.
    """
    given = modules_in(module, "replicate")
    require_kinds("replicate", mesh, mp_policy, offload_policy)
    ignored = ignored_in("replicate", ignored_params)
    target = replicate_mesh(mesh, dp_mesh_dims)
    unit = make_unit(given, target, False, None, mp_policy, offload_policy, ignored)
    for one in unit.modules:
        fsdp2.register_replicate_state(one)
    return module


replicate.state = fsdp2.replicate_state  # type: ignore[attr-defined]  # as torch's has it


def make_unit(
    given: tuple[Any, ...],
    target: ShardMesh,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored: set[nn.Parameter],
) -> Unit:
    """Shard the parameters of the modules over the ranks of ``target`` as one unit, and return the unit."""
    modules = _roots_of_list(tuple(map(dynamo.behind_compile, given)))
    reshard, inner_size = _resolve_reshard(reshard_after_forward, target)

    # The checks that may refuse the call come first, and change nothing.
    managed = _managed_modules(modules)
    claimed, unclaimed = _parameter_slots(modules, managed, ignored)
    cuts: dict[str, Cut] = {}
    overrides: dict[str, torch.dtype] = {}
    for fqn, slots in unclaimed.items():
        _validate_param(fqn, slots[0].param, target)
        cuts[fqn] = cut_of(fqn, slots[0].param, target, shard_placement_fn)
        if inner_size is not None:
            _validate_slicing(fqn, cuts[fqn], target, inner_size)
        overrides.update(_dtype_override(fqn, slots[0].param, mp_policy))
    unit = Unit(
        modules=modules,
        label="+".join(original_class(one).__name__ for one in modules),
        mesh=target,
        mp_policy=mp_policy,
        mixin=FSDPModule,
        ends=ENDS,
        params=[
            shard_param(fqn, order, slots, cuts[fqn], target.device, offload_policy)
            for order, (fqn, slots) in enumerate(unclaimed.items())
        ],
        overrides=overrides,
        offload=isinstance(offload_policy, CPUOffloadPolicy),
        pins=isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory,
        settings=Settings(reshard_after_forward=reshard),
    )
    unit.watch = UnitWatch(unit)
    for param in unit.params:
        if has_extension(param.fqn, param.shard):  # type: ignore[arg-type]
            protocol_of(param, param.shard, mp_policy)
    moved = _moved_buffers(managed, target.device)
    install_passes()
    lookout.know(unit)
    if inner_size is not None:
        unit.post_forward = inner_mesh(target, inner_size)

    fulls = [slots[0].param for slots in unclaimed.values()]
    inner = [*(one for module in modules for one in units_in(module)), *map(_owner_of, claimed.values())]
    parts = [part for one in dict.fromkeys(inner) for part in parts_of(one)]
    with all_or_nothing([*(child for one in modules for child in one.modules()), *fulls, *parts]):
        for one in modules:
            one.__dict__[STATE] = unit
            fsdp2.register_fsdp2_state(one, FSDP2View(unit))
        for param in unit.params:
            param.install()
            for slot in param.slots:
                _register_read(slot, param, unit, unit)
        for slots in claimed.values():
            _adopt(slots, unit)
        _demote_inner_roots(unit)
        refresh(unit)
        for one in modules:
            stand_before(one)
            stand_before_wrappers(one)
    note_sharded(fulls)
    for buffer, there in moved:  # in place, so that it moves wherever the model has it
        buffer.data = there
    logger.debug(
        "%s: one unit of %d parameters, sharded over %d ranks and replicated %d times",
        unit.label,
        len(unit.params),
        target.num_shards,
        target.num_replicas,
    )
    return unit


def _demote_inner_roots(unit: Unit) -> None:
    """Note that former outermost units are inside this one now: FSDP2's rule for roots applies to this one alone."""
    for inner in unit.inside():
        if inner is unit:
            continue
        unit.has_inner |= bool(inner.params)
        if inner.is_root:
            inner.put_inside(unit)
            running(unit).iteration.adopt(running(inner).own_iteration)
            refresh(inner)


def _roots_of_list(modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """Return the modules that no other one of them contains."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return tuple(dict.fromkeys(module for module in modules if id(module) not in inner))


def _validate_reshard(reshard_after_forward: Any) -> None:
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, int)):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{reshard_after_forward!r}. Pass either, or None for the default."
        )


def _resolve_reshard(asked: bool | int | None, mesh: ShardMesh) -> tuple[bool | None, int | None]:
    """Return whether backward gathers again, and over how many ranks if not over all."""
    if not mesh.group:
        return False, None  # nothing is gathered
    if asked is None or isinstance(asked, bool):
        return asked, None
    size = mesh.num_shards
    if asked < 1 or size % asked != 0:
        factors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, not {asked}: so many ranks "
            f"hold shards. Pass one of {factors}, or a bool."
        )
    if mesh.spmd is not None:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims): DTensors are not "
            f"resharded to fewer ranks, here {asked}. Pass True, False or None."
        )
    if asked == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, so they stay whole after "
            "forward. Pass False to say so, or True to reshard.",
            stacklevel=4,
        )
        return False, None
    return True, None if asked == size else asked


def _validate_slicing(fqn: str, cut: Cut, target: ShardMesh, size: int) -> None:
    """Raise for a parameter of which one of ``size`` slices cannot be kept after forward."""
    if cut.read_as is not None:
        raise NotImplementedError(
            "Resharding to smaller mesh is not supported for DTensor parameters, and "
            f"reshard_after_forward={size} asks for it for {fqn}. Pass True, False or None for its unit."
        )
    if cut.mesh != target:
        raise NotImplementedError(
            f"{fqn} has a mesh of its own from shard_placement_fn: reshard_after_forward={size} works with the unit's "
            "mesh only. Pass True, False or None, or make it a unit of its own with that mesh."
        )


def _managed_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose parameters this call takes: the subtrees without units of earlier calls and DDP."""
    managed: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in managed or unit_of(module) is not None:
            return
        composed = fsdp2.composed_by(module)
        if "fully_shard" in composed:
            raise ValueError(
                f"A {original_class(module).__name__} was sharded by torch.distributed.fsdp.fully_shard. Use one of "
                "the two for the whole model: fsdp_compile.adopt() has torch's name be this one's."
            )
        if "replicate" in composed:
            return
        managed[module] = None
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(managed)


def _parameter_slots(
    modules: Sequence[nn.Module], managed: list[nn.Module], ignored: set[nn.Parameter]
) -> tuple[dict[str, list[Slot]], dict[str, list[Slot]]]:
    """Return each parameter's places by the FQN of the first one: (parameters of earlier calls, those of this call)."""
    by_param: dict[nn.Parameter, tuple[str, list[Slot]]] = {}
    chosen = set(managed)
    for fqn, module, name in fqns_in(modules):
        slot = Slot(module, name)
        is_taken = slot.param is None or slot.param in ignored or name in module.__dict__.get(READS, {})
        if module in chosen and not is_taken:
            by_param.setdefault(slot.param, (fqn, []))[1].append(slot)
    claimed: dict[str, list[Slot]] = {}
    unclaimed: dict[str, list[Slot]] = {}
    for param, (fqn, slots) in by_param.items():
        (claimed if hasattr(param, STAMP) else unclaimed)[fqn] = slots
    return claimed, unclaimed


def _validate_param(fqn: str, param: nn.Parameter, target: ShardMesh) -> None:
    if param.ndim == 0:
        raise ValueError(
            f"FSDP doesn't support scalar parameters. Change {fqn} to a 1D tensor with numel equal to 1, of shape "
            "(1,), or ignore it (ignored_params; ignored_states of FSDP1)."
        )
    if isinstance(param, DTensor) and param.device_mesh.device_type != target.device.type:
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{param.device_mesh.device_type} for {fqn} and {target.device.type} for FSDP. Use slices of one mesh."
        )


def _moved_buffers(managed: Iterable[nn.Module], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return each buffer that is on another device, once, with a copy of it on ``device``."""
    buffers = dict.fromkeys(buffer for module in managed for buffer in module._buffers.values() if buffer is not None)
    return [(one, one.to(device)) for one in buffers if not one.is_meta and one.device != device]


def _dtype_override(fqn: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> dict[str, torch.dtype]:
    """Return the dtype, by FQN, that ``param_dtype_override_fn`` (torch 2.15) gives a parameter; empty without one."""
    override_fn = getattr(policy, "param_dtype_override_fn", None)
    dtype = None if override_fn is None else override_fn(param)
    if dtype is None:
        return {}
    allowed = "None, param_dtype, or the parameter's original dtype"
    if not isinstance(dtype, torch.dtype) or dtype not in (policy.param_dtype, param.dtype):
        must = allowed if isinstance(dtype, torch.dtype) else "a torch.dtype or None"
        raise ValueError(
            f"param_dtype_override_fn must return {must} but got {dtype!r} for {fqn}. Return None, "
            f"{policy.param_dtype} or {param.dtype}."
        )
    return {fqn: dtype}


def _adopt(slots: list[Slot], reader: Unit) -> None:
    """Tie the slots to a parameter that an earlier call sharded: one shard, one gather, one gradient."""
    param: ShardedParam = getattr(slots[0].param, STAMP)
    owner = _owner_of(slots)
    for slot in slots:
        slot.register(param.shard)
        param.slots.append(slot)
        _register_read(slot, param, owner, reader)
    refresh(owner, [param])


def _owner_of(slots: list[Slot]) -> Unit:
    """Return the unit of the earlier call that sharded the parameter in the slots."""
    first = getattr(slots[0].param, STAMP).slots[0]
    owner: Unit = first.module.__dict__[READS][first.name][1]
    return owner


def _register_read(slot: Slot, param: ShardedParam, owner: Unit, reader: Unit) -> None:
    slot.module.__dict__.setdefault(READS, {})[slot.name] = (param, owner, reader)
