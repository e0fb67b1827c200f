"""The registry of what is compared: one `Variant` for each row of the table.

A setup receives the plain model, shards or wraps it in place, and returns the forward that a step calls:

    setup(model, mesh, settings) -> forward;   forward(tokens) -> loss, or None where nothing is trained

Workers are fresh processes, so a setup may set torch's global configuration as a user's script would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.estimates import estimator
from benchmarks.settings import Settings
from benchmarks.workload import Model, autocast, blocks, loss_of, torch_dtype

Forward = Callable[[Tensor], "Tensor | None"]
Setup = Callable[[nn.Module, DeviceMesh, Settings], Forward]


class Unavailable(RuntimeError):
    """The variant cannot run in this environment; the message says what to install."""


@dataclass(frozen=True)
class Variant:
    name: str
    about: str
    """One phrase: what runs, and which primitive reduces the gradients."""
    setup: Setup
    sums_gradients: bool = False
    """Gradients arrive as the sum over ranks, so the loss is divided by the world size before backward."""
    compiles: bool = True
    """Calls torch.compile, so the compiler is primed before the first step is timed."""
    has_loss_of_all: bool = True
    """Trains on the batches of all ranks, so its loss must agree with the reference."""


# Bounds: what no sharded variant can beat without doing less.


def _unsharded(model: nn.Module, mesh: DeviceMesh, settings: Settings) -> Forward:
    compiled = torch.compile(model)

    def forward(tokens: Tensor) -> Tensor:
        with autocast(settings):
            return loss_of(compiled, tokens)

    return forward


def _collectives_alone(
    model: nn.Module, mesh: DeviceMesh, settings: Settings, *, all_to_all: bool
) -> Forward:
    """Run collectives alone, in turn: for each block and the rest, gather in forward, gather and reduce in backward."""
    world = mesh.size()
    block_numels = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    rest = sum(p.numel() for p in model.parameters()) - sum(block_numels)
    shard_numels = [-(-numel // world) for numel in [rest, *block_numels]]

    reduce_dtype = torch_dtype(settings.dtype)
    gather_dtype = torch_dtype(settings.param_dtype or settings.dtype)
    largest = world * max(shard_numels)
    with torch.device(settings.device):
        shards = [torch.ones(numel, dtype=gather_dtype) for numel in shard_numels]
        gathered, unreduced = torch.empty(largest, dtype=gather_dtype), torch.ones(largest, dtype=reduce_dtype)
        received = torch.empty(largest, dtype=reduce_dtype)
        reduced = torch.empty(max(shard_numels), dtype=reduce_dtype)

    def reduce(numel: int) -> None:
        source = unreduced[: world * numel]
        if all_to_all:
            dist.all_to_all_single(received[: world * numel], source)
            torch.sum(received[: world * numel].view(world, numel), dim=0, out=reduced[:numel])
        else:
            dist.reduce_scatter_tensor(reduced[:numel], source)

    def forward(tokens: Tensor) -> None:
        for shard in shards:
            dist.all_gather_into_tensor(gathered[: world * shard.numel()], shard)
        for shard in reversed(shards):
            dist.all_gather_into_tensor(gathered[: world * shard.numel()], shard)
            reduce(shard.numel())

    return forward


# Peers in torch.


def _ddp(model: nn.Module, mesh: DeviceMesh, settings: Settings) -> Forward:
    from torch.nn.parallel import DistributedDataParallel

    compiled = torch.compile(DistributedDataParallel(model, process_group=mesh.get_group()))

    def forward(tokens: Tensor) -> Tensor:
        with autocast(settings):
            return loss_of(compiled, tokens)

    return forward


def _fsdp1(model: nn.Module, mesh: DeviceMesh, settings: Settings) -> Forward:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = MixedPrecision(**_dtypes(settings)) if settings.param_dtype else None
    wrapped = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        auto_wrap_policy=ModuleWrapPolicy({type(blocks(model)[0])}),
        mixed_precision=policy,
        use_orig_params=True,
        device_id=next(model.parameters()).device,
    )
    return partial(loss_of, wrapped)


def _fsdp2(
    model: nn.Module, mesh: DeviceMesh, settings: Settings, *, compile_blocks: bool, compile_model: bool
) -> Forward:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(**_dtypes(settings))
    for block in blocks(model):
        if compile_blocks:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return partial(loss_of, _maybe_compiled(model, compile_model))


# SimpleFSDP, from torchtitan.


def import_simple_fsdp() -> Any:
    try:
        return import_module("torchtitan.experiments.graph_trainer.simple_fsdp")
    except ImportError as error:
        raise Unavailable(
            f"torchtitan is not importable: {error}; pip install --no-deps torchtitan==0.3.0, "
            "and pip install tyro spmd_types==0.2.3"
        ) from error


def _simple_fsdp(model: nn.Module, mesh: DeviceMesh, settings: Settings, *, scheduled: bool) -> Forward:
    simple_fsdp = import_simple_fsdp()
    if scheduled:
        optimizations = torch._inductor.config.aten_distributed_optimizations
        optimizations.enable_overlap_scheduling = True
        optimizations.collective_bucketing = True
        if mesh.device_type == "cpu":  # both of its own estimators of compute ask for a GPU
            optimizations.custom_runtime_estimation = estimator(settings.wire_bytes_per_s)
    policy = simple_fsdp.MixedPrecisionPolicy(**_dtypes(settings))
    simple_fsdp.data_parallel(model, mesh, mode="fully_shard", mp_policy=policy)
    return partial(loss_of, torch.compile(model))


# Ours.


def import_ours() -> Any:
    try:
        module = import_module("fsdp_compile")
    except ImportError as error:
        raise Unavailable(f"fsdp_compile is not importable: {error}; pip install -e .") from error
    if module.__file__ is None:  # a mere folder of that name, which Python takes for a namespace package
        raise Unavailable("fsdp_compile is not importable: the folder has no __init__.py; pip install -e .")
    return module


def _ours(
    model: nn.Module,
    mesh: DeviceMesh,
    settings: Settings,
    *,
    compiled: bool,
    compile_blocks: bool = False,
    reshard_after_forward: bool | None = None,
    **knobs: str,
) -> Forward:
    fsdp_compile = import_ours()
    policy = fsdp_compile.MixedPrecisionPolicy(**_dtypes(settings))
    for block in blocks(model):
        if compile_blocks:
            block.compile()
        fsdp_compile.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fsdp_compile.fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    _set_knobs(model, knobs)
    return partial(loss_of, _maybe_compiled(model, compiled))


def _set_knobs(model: nn.Module, knobs: dict[str, str]) -> None:
    """The one place that knows the name under which fsdp_compile takes its extra knobs."""
    if knobs:
        import_ours().configure(model, **knobs)


# Shared by the setups above.


def _dtypes(settings: Settings) -> dict[str, Any]:
    """Return the arguments of every mixed precision policy. The reduction is in the stored dtype, which is set
    explicitly: what an unset reduce_dtype means differs between torch versions."""
    if settings.param_dtype is None:
        return {}
    return {"param_dtype": torch_dtype(settings.param_dtype), "reduce_dtype": torch_dtype(settings.dtype)}


def _maybe_compiled(model: nn.Module, compiled: bool) -> Model:
    return torch.compile(model) if compiled else model


_ALL = (
    Variant(
        "unsharded",
        "compute alone: each rank trains the whole model on its own batch; no reduction",
        _unsharded,
        has_loss_of_all=False,
    ),
    Variant(
        "collectives_rs",
        "collectives alone: 2 gathers and reduce_scatter",
        partial(_collectives_alone, all_to_all=False),
        compiles=False,
        has_loss_of_all=False,
    ),
    Variant(
        "collectives_a2a",
        "collectives alone: 2 gathers and all_to_all + sum",
        partial(_collectives_alone, all_to_all=True),
        compiles=False,
        has_loss_of_all=False,
    ),
    Variant("ddp", "DDP under torch.compile; all_reduce", _ddp),
    Variant("fsdp1", "FSDP1 eager; reduce_scatter", _fsdp1, compiles=False),
    Variant(
        "fsdp2",
        "FSDP2 eager; reduce_scatter",
        partial(_fsdp2, compile_blocks=False, compile_model=False),
        compiles=False,
    ),
    Variant(
        "fsdp2_blocks",
        "FSDP2, each block compiled; reduce_scatter",
        partial(_fsdp2, compile_blocks=True, compile_model=False),
    ),
    Variant(
        "fsdp2_whole",
        "FSDP2 under torch.compile(model); reduce_scatter",
        partial(_fsdp2, compile_blocks=False, compile_model=True),
    ),
    Variant(
        "simple_fsdp",
        "SimpleFSDP under torch.compile, weights kept for backward; reduce_scatter",
        partial(_simple_fsdp, scheduled=False),
        sums_gradients=True,
    ),
    Variant(
        "simple_fsdp_scheduled",
        "simple_fsdp with Inductor's overlap scheduling and bucketing; reduce_scatter",
        partial(_simple_fsdp, scheduled=True),
        sums_gradients=True,
    ),
    Variant(
        "ours_eager",
        "fsdp_compile without torch.compile, reduction=auto",
        partial(_ours, compiled=False),
        compiles=False,
    ),
    Variant(
        "ours_eager_rs",
        "fsdp_compile without torch.compile, reduction=reduce_scatter",
        partial(_ours, compiled=False, reduction="reduce_scatter"),
        compiles=False,
    ),
    Variant(
        "ours",
        "fsdp_compile under torch.compile, reduction=auto (on gloo: all_to_all + sum)",
        partial(_ours, compiled=True),
    ),
    Variant(
        "ours_budget",
        "ours, within what FSDP2 is predicted to need (memory_budget='fsdp2')",
        partial(_ours, compiled=True, memory_budget="fsdp2"),
    ),
    Variant(
        "ours_neighbours",
        "ours with bucketing='neighbours': small units travel together",
        partial(_ours, compiled=True, bucketing="neighbours"),
    ),
    Variant(
        "ours_kept",
        "ours with reshard_after_forward=False: backward gathers nothing again",
        partial(_ours, compiled=True, reshard_after_forward=False),
    ),
    Variant(
        "ours_blocks",
        "fsdp_compile, each block compiled, reduction=auto",
        partial(_ours, compiled=False, compile_blocks=True),
    ),
    Variant(
        "ours_rs",
        "fsdp_compile under torch.compile, reduction=reduce_scatter",
        partial(_ours, compiled=True, reduction="reduce_scatter"),
    ),
    Variant(
        "ours_blocks_rs",
        "fsdp_compile, each block compiled, reduction=reduce_scatter",
        partial(_ours, compiled=False, compile_blocks=True, reduction="reduce_scatter"),
    ),
)

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _ALL}
TIME_BASELINE = "fsdp2_blocks"
MEMORY_BASELINE = "fsdp2"
