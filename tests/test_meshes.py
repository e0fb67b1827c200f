"""Meshes of more than one dimension, and more than one mesh: HSDP, tensor parallelism, dp_mesh_dims, replicate."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsdp_compile
from fsdp_compile import (
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    replicate,
)
from fsdp_compile.core.mesh import inner_mesh, shard_mesh
from fsdp_compile.core.spec import division
from fsdp_compile.passes.ranks.agree import Agreement
from fsdp_compile.passes.wire.ledger import GraphText, ListedLaunch
from tests.comparing import assert_same_grads, batches, full, loss_of, reference_backward, train_and_compare
from tests.compiling import PATHS, compile_blocks, compiled, num_graphs
from tests.models import Block, EvenBlock, Spread, Stack, mesh_of, pair, shard, twins
from tests.on_ranks import on_four_ranks
from tests.ranks import Ranks
from tests.recording import Wire

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def unit_of(module: nn.Module) -> Any:
    return module.__dict__["_fsdp_compile_state"]


def assert_gradients(path: str, sharded: nn.Module, unsharded: nn.Module, place: int, x: Tensor) -> None:
    """Those of one step on ``x``, of which this rank has the batch at ``place``."""
    loss_of(compiled(sharded, path)(x[place])).backward()
    reference_backward(unsharded, x)
    assert_same_grads(sharded, unsharded)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# HSDP: dim 0 replicates, dim 1 shards


@pytest.mark.compat
@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("eager", {"reduction": "reduce_scatter"}),
        ("passes", {"reduction": "reduce_scatter", "bucketing": "group"}),
    ],
)
@on_four_ranks
def test_replicas_of_shards_train_like_the_unsharded_model(path: str, options: dict[str, str]) -> None:
    unsharded, sharded = pair(make=lambda: Stack(1, tied=True), mesh=mesh_of("replicate", "shard"))
    assert sharded.embed.weight.placements == (Replicate(), Shard(0))
    fsdp_compile.configure(sharded, **options)
    train_and_compare(compiled(sharded, path), sharded, unsharded)


class Scale(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


@pytest.mark.parametrize("path", PATHS)
@on_four_ranks
def test_the_mean_is_over_all_ranks_and_fp16_does_not_overflow(path: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)
    models = [fully_shard(Scale(), mesh=mesh, mp_policy=policy) for mesh in (None, mesh_of("replicate", "shard"))]
    for model in (*models, replicate(Scale(), mp_policy=policy)):
        compiled(model, path)(torch.full((5,), 30000.0)).backward()
        torch.testing.assert_close(full(model.weight.grad), torch.full((5,), 30000.0))


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("factor", [None, 1.0, 3.0, 4.0])
@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_gradients_are_divided_once(
    ranks: int, factor: float | None, force_sum: bool, averages: bool, dtype: torch.dtype
) -> None:
    op, before, after = division(ranks, factor, force_sum, averages, dtype)
    by_backend = float(ranks) if op == "avg" else 1.0
    assert before * by_backend * after == pytest.approx(ranks if factor is None else factor)
    assert op == "sum" or (averages and not force_sum and factor is None)


def test_nccl_averages_on_the_way() -> None:
    assert division(4, None, False, True, FP32) == ("avg", 1.0, 1.0)
    assert division(4, None, False, False, FP32) == ("sum", 1.0, 4.0)
    assert division(4, None, False, True, FP16) == ("sum", 2.0, 2.0)


# Tensor parallelism: parallelize_module first, fully_shard on the other dimension of the mesh


class WideBlock(Block):
    """Hidden features that two tensor-parallel ranks share evenly, and their data-parallel ones do not: 34, 17, 9 + 8."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.up = nn.Linear(dim, 2 * dim + 2)
        self.down = nn.Linear(2 * dim + 2, dim)


def tensor_parallel(num_blocks: int, block: type[nn.Module]) -> tuple[Stack, Stack]:
    """(unsharded, sharded), the second on a mesh of "dp" and "tp"."""
    mesh = mesh_of("dp", "tp")
    unsharded, sharded = twins(lambda: Stack(num_blocks, block=block))
    for layer in sharded.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return unsharded, shard(sharded, mesh=mesh["dp"])


@pytest.mark.compat
@pytest.mark.parametrize("path", PATHS)
@on_four_ranks
def test_tensor_parallel_parameters_train_like_the_unsharded_model(path: str) -> None:
    """Also where ranks have uneven parts of them."""
    unsharded, sharded = tensor_parallel(1, WideBlock)
    up, down = sharded.layers[0].up, sharded.layers[0].down
    assert str(up.weight.placements[0]) == "_S(0, 2)" and up.weight.placements[1] == Shard(0)
    assert str(up.bias.placements[0]) == "_S(0, 2)" and up.bias.placements[1] == Shard(0)
    assert down.weight.placements == (Shard(0), Shard(1))
    assert down.bias.placements == (Shard(0), Replicate())
    assert sharded.layers[0].norm.weight.placements == (Shard(0),)
    for (fqn, ours), theirs in zip(sharded.named_parameters(), unsharded.parameters()):
        torch.testing.assert_close(full(ours), theirs, msg=fqn)
    train_and_compare(compiled(sharded, path), sharded, unsharded, place=dist.get_rank() // 2, num_places=2)


#: ``DTensor.to_local()`` gives a view: of a unit that returns one ours warns, as FSDP2 does.
RETURNS_VIEWS = pytest.mark.filterwarnings("ignore:.*returned a view tensor")


@RETURNS_VIEWS
@on_four_ranks
def test_partial_gradients_are_summed_before_the_reduction() -> None:
    """Norms whose weights are replicated over tp, and whose gradients are partial there. The matrix has it compiled."""
    mesh = mesh_of("dp", "tp")
    unsharded, sharded = twins(EvenBlock)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(sharded, mesh["tp"], plan)
    cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(sharded, mesh["tp"], cut)
    whole = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
    parallelize_module(sharded, mesh["tp"], whole)
    fully_shard(sharded, mesh=mesh["dp"])
    assert sharded.norm.weight.placements == (Shard(0), Replicate())
    x = inputs(2, 3, 4, 16)  # [dp, batch, sequence, features]
    assert_gradients("eager", sharded, unsharded, mesh.get_local_rank("dp"), x)


@pytest.mark.parametrize("path", PATHS)
@on_four_ranks
def test_a_read_gives_the_dtensor_that_the_parameter_was(path: str) -> None:
    """Forward reads the DTensor that the parameter was; outside it is the shard on both dimensions."""
    mesh = mesh_of("dp", "tp")

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.arange(24.0).view(6, 4)
            self.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(1)]))

        def forward(self) -> Any:
            return self.weight * 2

    model = fully_shard(Reader(), mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert model.weight.to_local().shape == (3, 2)
    out = compiled(model, path)()
    assert isinstance(out, DTensor) and out.placements == (Shard(1),) and out.dtype is BF16
    assert out.device_mesh == mesh["tp"]
    torch.testing.assert_close(out.full_tensor(), torch.arange(24.0).view(6, 4).to(BF16) * 2)
    assert isinstance(model.weight, DTensor) and model.weight.placements == (Shard(0), Shard(1))


def test_blocks_of_tensor_parallel_parameters_share_one_graph(fake_group_of_four: None) -> None:
    torch._dynamo.utils.counters.clear()
    _, sharded = tensor_parallel(2, EvenBlock)
    compile_blocks(sharded)(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    assert num_graphs() == 1


# dp_mesh_dims: parameters are DTensors on the whole mesh already


SPMD = {
    "FSDP and TP": (("dp", "tp"), "dp", None, ("dp", "tp"), ("S(0)", "S(1)")),
    "TP in front": (("tp", "dp"), "dp", None, ("tp", "dp"), ("S(1)", "S(0)")),
    "HSDP": (("rep", "dp"), "dp", "rep", ("rep", "dp"), ("R", "S(0)")),
    "two dimensions to shard over": (("a", "b"), ("a", "b"), None, ("a_b",), ("S(0)",)),
    "DDP and TP": (("rep", "tp"), None, "rep", ("rep", "tp"), ("R", "S(1)")),
    "DDP over two dimensions": (("a", "b"), None, ("a", "b"), ("a", "b"), ("R", "R")),
}


@pytest.mark.compat
@pytest.mark.parametrize(
    ("path", "case"),
    [*(("eager", case) for case in SPMD), ("aot_eager", "two dimensions to shard over")],
)
@RETURNS_VIEWS
@on_four_ranks
def test_dp_mesh_dims_say_what_is_data_parallel(path: str, case: str) -> None:
    dims, shard_dims, replicate_dims, stored_dims, placements = SPMD[case]
    mesh = mesh_of(*dims)
    unsharded, sharded = twins(Spread)
    sharded.distribute(mesh)
    fully_shard(sharded, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=shard_dims, replicate=replicate_dims))
    assert sharded.down.weight.device_mesh.mesh_dim_names == stored_dims
    assert tuple(map(str, sharded.down.weight.placements)) == placements
    names = [dim for dim in dims if dim != "tp"]
    place = 0
    for name in names:
        place = 2 * place + mesh.get_local_rank(name)
    for (fqn, ours), theirs in zip(sharded.named_parameters(), unsharded.parameters()):
        torch.testing.assert_close(full(ours), theirs, msg=fqn)
    assert_gradients(path, sharded, unsharded, place, inputs(2 ** len(names), 3, 8))


def test_flattened_dimensions_leave_room_for_the_others(fake_group_of_four: None) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "tp"))
    model = Spread()
    model.distribute(mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")))
    assert model.up.weight.device_mesh.mesh_dim_names == ("a_b", "tp")
    assert tuple(map(str, model.up.weight.placements)) == ("_S(0, 2)", "S(0)")
    assert model.up.weight.to_local().shape == (4, 8)


# A mesh of its own for a parameter


@pytest.mark.compat
@on_four_ranks
def test_a_parameter_may_have_a_mesh_of_its_own() -> None:
    """The experts' gradients are averaged over the inner ranks, all others over all. The matrix has it compiled."""
    mesh = mesh_of("outer", "inner")
    unsharded, sharded = twins(Block)
    expert_shapes = {unsharded.up.weight.shape, unsharded.down.weight.shape}
    seen: list[int] = []

    def place(param: nn.Parameter) -> Any:
        seen.append(id(param))
        return ShardPlacementResult(Shard(0), mesh["inner"]) if param.shape in expert_shapes else None

    fully_shard(sharded, shard_placement_fn=place)
    assert len(seen) == len(set(seen)) == len(list(unsharded.parameters()))
    assert sharded.up.weight.device_mesh == mesh["inner"] and sharded.up.bias.device_mesh.size() == 4
    x = inputs(4, 3, 16)
    for _ in range(2):
        sharded.zero_grad()
        loss_of(sharded(x[dist.get_rank()])).backward()
    inner = [rank for rank in range(4) if rank // 2 == dist.get_rank() // 2]
    for fqn, param in sharded.named_parameters():
        members = inner if param.shape in expert_shapes else range(4)
        unsharded.zero_grad()
        reference_backward(unsharded, x[list(members)])
        torch.testing.assert_close(full(param.grad), unsharded.get_parameter(fqn).grad, msg=fqn)


@on_four_ranks
def test_norms_of_several_meshes_are_combined_by_hand() -> None:
    mesh = mesh_of("outer", "inner")
    unsharded, sharded = twins(Block)
    inner = {sharded.up.weight, sharded.down.weight}
    inside = ShardPlacementResult(Shard(0), mesh["inner"])
    fully_shard(sharded, shard_placement_fn=lambda param: inside if param in inner else None)
    x = torch.ones(3, 16).cumsum(0)  # the same on all ranks: averages over few and over many are equal
    for one in (sharded, unsharded):
        loss_of(one(x)).backward()
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for param in sharded.parameters():
        by_mesh.setdefault(param.device_mesh, []).append(param)
    assert len(by_mesh) == 2
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.01)  # torch stacks the norms, which are on two meshes
    norms = [full(torch.nn.utils.get_total_norm([param.grad for param in params])) for params in by_mesh.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for params in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(params, 0.01, norm)
    expected = torch.nn.utils.clip_grad_norm_(unsharded.parameters(), 0.01)
    torch.testing.assert_close(norm, expected)
    assert_same_grads(sharded, unsharded)


def test_torchs_mesh_infos_are_understood(fake_group_of_four: None) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    mesh = mesh_of("replicate", "shard")
    infos = [FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0), HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)]
    for info, placements in zip(infos, [(Shard(0),), (Replicate(), Shard(0))]):
        result = SimpleNamespace(placement=None, mesh_info=info)
        model = fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda param, result=result: result)
        assert model.weight.placements == placements and model.weight.to_local().shape == (2, 4)


# replicate: no shards at all


@pytest.mark.compat
@pytest.mark.parametrize("path", PATHS)
@on_four_ranks
def test_replicated_modules_train_like_the_unreplicated_one(path: str) -> None:
    unsharded, replicated = twins(lambda: Stack(1, tied=True))
    for layer in replicated.layers:
        assert replicate(layer) is layer
    replicate(replicated)
    assert isinstance(replicated, FSDPModule) and replicated.embed.weight.placements == (Replicate(),)
    assert replicated.embed.weight.to_local().shape == unsharded.embed.weight.shape
    run = compiled(replicated, path)
    train_and_compare(run, replicated, unsharded)
    with Wire() as wire:
        loss_of(run(batches(0)[0])).backward()
    assert set(wire.calls) == {"all_reduce"}
    with torch.no_grad():
        torch.testing.assert_close(replicated(batches(0)[0]), unsharded(batches(0)[0]), atol=1e-4, rtol=1e-3)


@on_four_ranks
def test_tensor_parallel_parameters_may_be_replicated() -> None:
    mesh = mesh_of("dp", "tp")
    unsharded, replicated = twins(EvenBlock)
    parallelize_module(replicated, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    replicate(replicated, mesh=mesh["dp"])
    assert replicated.up.weight.placements == (Replicate(), Shard(0))
    assert_gradients("eager", replicated, unsharded, mesh.get_local_rank("dp"), inputs(2, 3, 16))


# What stands in the graphs


def collectives(graph: Any) -> str:
    """Kind and names of each collective, in the order of launch."""
    return "\n".join(f"{one.kind} {' '.join(one.fqns)}" for one in graph.launches)


def test_a_bucket_is_all_reduced_before_the_next_unit_is_reduced(fake_group_of_four: None) -> None:
    model = shard(Stack(1), mesh=mesh_of("replicate", "shard"), reshard_after_forward=False)
    fsdp_compile.configure(model, reduction="reduce_scatter", bucketing="group")
    root = "embed.weight norm.weight norm.bias head.weight"
    block = " ".join(f"layers.0.{name}" for name, _ in Block().named_parameters())
    with fsdp_compile.inspect(model) as report:
        torch.compile(model, fullgraph=True, backend="passes")(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    assert collectives(report.forward) == f"all_gather {root}\nall_gather {block}"
    assert collectives(report.backward) == (
        f"reduce_scatter {block}\nall_reduce {block}\nreduce_scatter {root}\nall_reduce {root}"
    )
    group, code = unit_of(model).mesh, report.backward.code()
    assert f"{group.group!r}: 2" in code and f"{group.replicate_group!r}: 2" in code
    assert "all_reduce" in str(report)


def _agreement() -> str:
    mesh = shard_mesh(mesh_of("replicate", "shard"))
    names = ("only.in.this.test", "another")
    together = (ListedLaunch("all_gather", mesh.group, "float32", 8, names, ()),)
    apart = tuple(ListedLaunch("all_gather", mesh.group, "float32", 4, (name,), ()) for name in names)
    summed = ListedLaunch("all_reduce", mesh.replicate_group, "float32", 8, names, ())
    late = dist.get_rank() >= 2  # the second replica
    # As stages of a pipeline, which share no group: equal names say nothing.
    Agreement().check(GraphText("forward", "", (), apart if late else together))
    if late:
        dist.barrier()
    try:
        Agreement().check(GraphText("backward", "", (), (*(apart if late else together), summed)))
    except RuntimeError as error:
        return str(error)
    finally:
        if not late:
            dist.barrier()
    return ""


def test_replicas_that_launch_differently_are_told_so(four_ranks: Ranks) -> None:
    said = four_ranks.run(_agreement)
    assert said[:2] == ["", ""]
    assert all("only.in.this.test" in text and "same arguments on every rank" in text for text in said[2:])


# reshard_after_forward=n


def test_an_int_chooses_the_ranks_to_gather_from_in_backward(fake_group_of_four: None) -> None:
    def group(value: Any, **kwargs: Any) -> Any:
        return unit_of(fully_shard(nn.Linear(4, 4), reshard_after_forward=value, **kwargs))

    assert group(4).regather and group(4).post_forward is None
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        assert not group(1).regather
    two = group(2)
    assert two.regather and two.post_forward.num_shards == 2 and two.post_forward.rank == 0
    assert group(2).post_forward.group == two.post_forward.group  # one process group for all units
    assert group(2, mesh=mesh_of("replicate", "shard")).post_forward is None


@on_four_ranks
def test_the_inner_ranks_are_neighbours() -> None:
    mesh = inner_mesh(shard_mesh(None), 2)
    first, place = divmod(dist.get_rank(), 2)
    assert (mesh.mesh.mesh.tolist(), mesh.rank) == ([2 * first, 2 * first + 1], place)


# Users' mistakes


def _mesh(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def _linear(**kwargs: Any) -> None:
    fully_shard(nn.Sequential(nn.Linear(8, 8)), **kwargs)


def _on(its_mesh: DeviceMesh, placements: list[Placement], **kwargs: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, its_mesh, placements))
    fully_shard(model, **kwargs)


def _replicated_placement_mesh() -> None:
    info = SimpleNamespace(mesh=_mesh((4,), "dp"), shard_mesh_dim=None, replicate_mesh_dim=0)
    _linear(shard_placement_fn=lambda param: SimpleNamespace(placement=Shard(0), mesh_info=info))


def _int_and_own_mesh() -> None:
    mesh = _mesh((2, 2), "a", "b")
    _linear(reshard_after_forward=2, shard_placement_fn=lambda param: ShardPlacementResult(Shard(0), mesh["b"]))


def _dims(**kwargs: Any) -> Any:
    return SimpleNamespace(**{"shard": None, "replicate": None, **kwargs})


Row = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "dp_mesh_dims without a mesh": (lambda: _linear(dp_mesh_dims=_dims(shard="dp")), ValueError, ("is None",)),
    "a dimension for both": (
        lambda: _linear(mesh=_mesh((4,), "dp"), dp_mesh_dims=_dims(shard="dp", replicate="dp")), ValueError, ("twice",)),
    "an int of 0": (lambda: _linear(reshard_after_forward=0), ValueError, ("not 0", "1, 2, 4")),
    "an int beyond the ranks": (lambda: _linear(reshard_after_forward=8), ValueError, ("of 4, not 8",)),
    "an int and a mesh of its own": (_int_and_own_mesh, NotImplementedError, ("0.weight", "=2")),
    "tensor parallelism over the same ranks": (
        lambda: _on(_mesh((4,), "tp"), [Shard(0)], mesh=_mesh((4,), "dp")), ValueError, ("0.weight", "one mesh")),
    "placements where nothing is sharded": (
        lambda: _linear(mesh=_mesh((4,), "dp"), dp_mesh_dims=_dims(replicate="dp"), shard_placement_fn=lambda p: Shard(0)),
        ValueError, ("shard_placement_fn", "replicate")),
    "a placement's mesh that only replicates": (_replicated_placement_mesh, ValueError, ("0.weight", "FSDPMeshInfo")),
    "a placement result without a Shard": (
        lambda: _linear(shard_placement_fn=lambda p: ShardPlacementResult(Replicate(), _mesh((4,), "dp"))),  # type: ignore[arg-type]
        ValueError, ("0.weight", "Replicate()")),
    "fully_shard of what is replicated": (
        lambda: fully_shard(replicate(nn.Linear(4, 4))), AssertionError, ("Linear", "already")),
    "replicate of nothing": (lambda: replicate([]), ValueError, ("replicate",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", ROWS)
def test_a_mistake_is_named(fake_group_of_four: None, mistake: str) -> None:
    provoke, exception, words = ROWS[mistake]
    with pytest.raises(exception) as failure:
        provoke()
    for word in words:
        assert word in str(failure.value)
