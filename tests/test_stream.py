"""Full weights stream out of shards, and come back, in few bytes; compared with the state dict of an unsharded model."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    ShardPlacementResult,
    fully_shard,
    load_full_params,
    stream_full_params,
)
from tests.comparing import full
from tests.models import EvenBlock, Spread, Stack, mesh_of, shard, twins
from tests.on_ranks import on_four_ranks, on_three_ranks, on_two_ranks
from tests.test_meshes import WideBlock, tensor_parallel

FP32, BF16 = torch.float32, torch.bfloat16


class Varied(Stack):
    """Tied weights; buffers, one of which is not saved; a parameter that fully_shard ignores."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("table", torch.randn(3, 5))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.scale = nn.Parameter(torch.tensor([1.25, 0.3]))


def varied() -> tuple[Any, Any]:
    theirs, ours = twins(Varied)
    return theirs, shard(ours, ignored_params={ours.scale})


def joined(stream: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """What came under each name, pieces put together."""
    came: dict[str, list[Tensor]] = {}
    for name, tensor in stream:
        came.setdefault(name, []).append(tensor.clone())
    return {name: some[0] if len(some) == 1 else torch.cat(some) for name, some in came.items()}


def assert_same(came: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    assert came.keys() == expected.keys()
    for name, one in expected.items():
        cast = one.to(dtype) if dtype is not None and one.is_floating_point() else one
        assert came[name].dtype == cast.dtype and torch.equal(came[name], cast), name


def test_what_streams_after_a_compiled_step_is_the_unsharded_models(two_ranks: Any) -> None:
    two_ranks.run(_trained_llama)


def _trained_llama() -> None:
    from tests.test_hugging_face import inputs, made, sharded, train

    theirs = made("llama, tied")
    ours = sharded(made("llama, tied"), "llama, tied")
    run = torch.compile(ours, fullgraph=True)
    train(run, ours, [dist.get_rank()])
    train(theirs, theirs, [0, 1])
    came = joined(stream_full_params(run, max_bytes=20_000))
    expected = theirs.state_dict()
    assert came.keys() == expected.keys()
    torch.testing.assert_close(came, dict(expected), atol=1e-5, rtol=0)
    assert_same(came, {name: full(one) for name, one in ours.state_dict().items()})
    again = sharded(made("llama, tied", seed=1), "llama, tied")
    assert load_full_params(again, stream_full_params(ours, dtype=torch.float64)) == []
    torch.testing.assert_close(again(**inputs(0)).logits, ours(**inputs(0)).logits, atol=0, rtol=0)


@pytest.mark.parametrize("dst", [None, 0])
@on_three_ranks
def test_uneven_shards_whole_or_in_pieces(dst: int | None) -> None:
    theirs, ours = varied()
    expected = theirs.state_dict()
    here = dst in (None, dist.get_rank())
    for settings in ({}, {"max_bytes": 900}, {"max_bytes": 900, "pieces": True}, {"dtype": torch.bfloat16}):
        came = joined(stream_full_params(ours, dst=dst, **settings))
        if here:
            assert_same(came, expected, settings.get("dtype"))
        else:
            shapes = {name: (one.shape, one.dtype) for name, one in expected.items()}
            assert {one.device.type for one in came.values()} == {"meta"}
            if "dtype" not in settings:
                assert {name: (one.shape, one.dtype) for name, one in came.items()} == shapes
    chosen = ["head.weight", "layers.1.up.bias", "embed.weight"]
    came = joined(stream_full_params(ours, names=chosen, dst=dst, device="cpu"))
    assert set(came) == set(chosen) and len(came["embed.weight"]) == 31
    assert "scratch" not in joined(stream_full_params(ours))


@on_three_ranks
def test_full_tensors_of_one_rank_or_of_each_become_shards() -> None:
    theirs, ours = varied()
    state = {name: one + 1 for name, one in theirs.state_dict().items()}
    rank = dist.get_rank()
    with torch.no_grad():
        for model in (varied()[1], shard(twins(Varied, seed=1)[0])):
            assert load_full_params(model, state.items()) == []
            came = joined(stream_full_params(model))
            assert_same(came, state)
            assert load_full_params(ours, came.items() if rank == 2 else (), src=2) == []
            assert_same(joined(stream_full_params(ours)), state)
    halves = [("embed.weight", half) for half in torch.zeros(31, 16).split(16)]
    missing = load_full_params(ours, halves if rank == 0 else (), src=0)
    assert "embed.weight" not in missing and "head.weight" not in missing and "layers.0.up.weight" in missing
    assert joined(stream_full_params(ours, names=["head.weight"]))["head.weight"].eq(0).all()
    other = shard(twins(Varied, seed=2)[0])
    load_full_params(other, stream_full_params(ours, max_bytes=900, pieces=True))
    assert_same(joined(stream_full_params(other)), joined(stream_full_params(ours)))


@on_two_ranks
def test_other_dims_offloaded_frozen_and_replicated_parameters() -> None:
    for settings in (
        {"shard_placement_fn": lambda param: Shard(1) if param.ndim > 1 and param.shape[1] % 2 == 0 else None},
        {"offload_policy": CPUOffloadPolicy()},
    ):
        theirs, ours = twins(lambda: Stack(block=EvenBlock))
        ours.requires_grad_(False)
        shard(ours, **settings)
        for more in ({}, {"max_bytes": 700, "pieces": True}, {"dtype": torch.float64}):
            assert_same(joined(stream_full_params(ours, **more)), theirs.state_dict(), more.get("dtype"))
            came = joined(stream_full_params(ours, dst=1, **more))
            if dist.get_rank() == 1:
                assert_same(came, theirs.state_dict(), more.get("dtype"))
        assert load_full_params(ours, twins(lambda: Stack(block=EvenBlock), 3)[0].state_dict().items(), src=0) == []
        assert_same(joined(stream_full_params(ours)), twins(lambda: Stack(block=EvenBlock), 3)[0].state_dict())
    theirs, ours = twins()
    fsdp_compile.replicate(ours)
    assert_same(joined(stream_full_params(ours)), theirs.state_dict())
    if dist.get_rank() == 0:  # one that is not sharded is a rank's own affair
        assert_same(joined(stream_full_params(theirs)), theirs.state_dict())
        assert load_full_params(theirs, theirs.state_dict().items()) == []


@on_two_ranks
def test_who_leaves_early_ends_the_stream_on_all_ranks() -> None:
    theirs, ours = varied()
    rank = dist.get_rank()

    def read(leaves: bool, raises: bool) -> None:
        for place, _ in enumerate(stream_full_params(ours, max_bytes=4000)):
            if place == 3 and leaves:
                if raises:
                    raise ArithmeticError("the engine is full")
                break

    read(leaves=True, raises=False)  # all leave
    for raises in (False, True):
        if rank == 1:
            with pytest.raises(RuntimeError, match=r"rank 0 left its loop, by a break or an exception, .* Read all of it"):
                read(leaves=False, raises=False)
        elif raises:
            with pytest.raises(ArithmeticError, match="the engine is full"):
                read(leaves=True, raises=True)
        else:
            read(leaves=True, raises=False)
        assert_same(joined(stream_full_params(ours)), theirs.state_dict())
    with pytest.raises(ValueError, match="name different tensors, or pass other arguments"):
        stream_full_params(ours, names=["scale", "table"] if rank else ["table", "scale"])

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "scale", torch.zeros(2)
        raise OSError("no file")

    error, words = [(RuntimeError, "load_full_params: rank 1 raised OSError: no file"), (OSError, "no file")][rank]
    with pytest.raises(error, match=words):
        load_full_params(ours, broken() if rank == 1 else (), src=1)

    def changed() -> Iterator[tuple[str, Tensor]]:
        for place, one in enumerate(stream_full_params(ours, max_bytes=4000)):
            if place == 3 and rank == 1:
                raise OSError("no memory")
            yield one

    error, words = [(RuntimeError, "rank 1 left its loop"), (OSError, "no memory")][rank]
    with pytest.raises(error, match=words):
        load_full_params(ours, changed())
    with torch.no_grad():
        ours.scale.copy_(theirs.scale)


@on_two_ranks
def test_a_stream_that_a_rank_does_not_read_or_cannot_load_ends_on_all() -> None:
    rank, (theirs, ours) = dist.get_rank(), varied()
    stream = stream_full_params(ours)
    if rank == 0:
        del stream
    else:
        with pytest.raises(RuntimeError, match="rank 0 left its loop"):
            list(stream)
    renamed = ((f"{name}_" if rank and name == "scale" else name, one) for name, one in stream_full_params(ours, max_bytes=8))
    error, words = [(RuntimeError, "rank 1 left its loop"), (ValueError, "the model has no scale_")][rank]
    with pytest.raises(error, match=words):
        load_full_params(ours, renamed)
    with pytest.raises((RuntimeError, ValueError), match=r"on the meta device, without values|rank 1 left its loop"):
        load_full_params(ours, stream_full_params(ours, dst=0))
    with pytest.raises(ValueError, match="every rank must read a stream"):
        load_full_params(ours, stream_full_params(ours, dst=0), src=0)
    for wrong, error, words in (
        (torch.empty(2, device="meta"), ValueError, "scale came on the meta device, without values"),
        ("scale.pt", TypeError, "scale came as a str. Pass a full tensor"),
    ):
        with pytest.raises((error, RuntimeError), match=words):  # the other rank is told
            load_full_params(ours, [("scale", wrong)] if rank == 0 else (), src=0)
    with pytest.raises(ValueError, match=r"load_full_params: ranks . and . name different tensors"):
        load_full_params(ours, [] if rank else [("scale", torch.ones(2))])
    with torch.no_grad():
        ours.scale.copy_(theirs.scale)
    assert_same(joined(stream_full_params(ours)), theirs.state_dict())


@pytest.mark.parametrize("is_large, foreach", [(False, False), (True, False), (True, True)])
@on_two_ranks
def test_streams_of_two_models_are_read_side_by_side_and_of_two_steps_not_at_all(is_large: bool, foreach: bool) -> None:
    """Also what was on its way when the step began does not come, however the optimizer wrote to the shards."""
    rank, (theirs, ours), (others, other) = dist.get_rank(), varied(), varied()
    sums = {name: one + another for (name, one), (_, another) in zip(stream_full_params(ours), stream_full_params(other))}
    expected = others.state_dict()
    assert_same(sums, {name: one + expected[name] for name, one in theirs.state_dict().items()})
    doubled = ((name, 2 * one) for name, one in stream_full_params(other, max_bytes=256, pieces=True))
    load_full_params(other, doubled)
    assert_same(joined(stream_full_params(other)), {name: 2 * one for name, one in expected.items()})
    held = stream_full_params(ours, max_bytes="1MiB" if is_large else 1)
    next(held)
    if rank == 1:
        held.close()  # and does not wait
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
        optimizer.step()
    assert_same(joined(stream_full_params(ours)), theirs.state_dict())
    if rank == 0:
        words = "was written to while the stream was read, so what comes would" if is_large else "rank 1 left its loop"
        with pytest.raises(RuntimeError, match=words):
            list(held)


@pytest.mark.parametrize("allowed, rows, least, most", [(5, 64, 2, 5), (5, 1, 1, 5), (0.5, 64, 1, 1)])
@on_two_ranks
def test_full_weights_stay_within_the_bytes_that_are_allowed(allowed: float, rows: int, least: int, most: int) -> None:
    """What is alive of full tensors, in multiples of one, is counted by their storages whenever a tensor comes.

    Ranks talk about the stream in storages of at most 128 bytes, which are not counted. A tensor that is larger than
    what is allowed comes alone. A tensor of a single row is on one rank, and not padded.
    """
    theirs, ours = twins(lambda: nn.Sequential(*(nn.Linear(64 * 64 // rows, rows, bias=False) for _ in range(12))))
    for layer in ours:
        fully_shard(layer)
    fully_shard(ours)
    size = 64 * 64 * 4
    shards = {one.to_local().untyped_storage().data_ptr() for one in ours.parameters()}  # type: ignore[attr-defined]
    before = {id(one) for one in gc.get_objects() if issubclass(type(one), Tensor)}
    peak = 0

    def look() -> int:
        found = [one for one in gc.get_objects() if type(one) is Tensor and id(one) not in before]
        held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}
        return sum(num_bytes for address, num_bytes in held.items() if address not in shards and num_bytes > 128)

    for name, tensor in stream_full_params(ours, max_bytes=int(allowed * size)):
        assert torch.equal(tensor, theirs.get_parameter(name))
        peak = max(peak, look())
    assert least * size <= peak <= most * size, f"{peak / size:.2f} of {most}"


@on_two_ranks
def test_a_single_destination_is_sent_to_alone_and_a_cast_halves_what_travels() -> None:
    _, ours = varied()
    received = {dtype: _received(lambda: joined(stream_full_params(ours, dst=1, dtype=dtype))) for dtype in (FP32, BF16)}  # noqa: B023
    whole = sum(one.numel() * 4 for one in ours.parameters() if isinstance(one, DTensor))
    assert received[FP32] == (whole if dist.get_rank() == 1 else 0)
    assert 2 * received[BF16] == received[FP32]


def _received(run: Callable[[], object]) -> int:
    """Bytes that the exchanges of ``run`` write on this rank; those that ask whether all read on do not count."""
    total = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_gather_into_tensor", "broadcast"):

            def counted(original: Any, output: Tensor, *args: Any, **kwargs: Any) -> Any:
                nonlocal total
                total += output.nbytes
                return original(output, *args, **kwargs)

            patch.setattr(dist, name, functools.partial(counted, getattr(dist, name)))
        run()
    return total


def replicas() -> tuple[Any, Any]:
    theirs, ours = twins(Varied)
    return theirs, shard(ours, mesh=mesh_of("replicate", "shard"), ignored_params={ours.scale})


def on_spmd_mesh() -> tuple[Any, Any]:
    theirs, ours = twins(Spread)
    ours.distribute(mesh_of("tp", "dp"))
    return theirs, fully_shard(ours, mesh=ours.mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def on_own_mesh() -> tuple[Any, Any]:
    """One layer is sharded over two of the four ranks."""
    theirs, ours = twins()
    mesh = mesh_of("outer", "inner")["inner"]
    apart = set(ours.layers[0].parameters())
    return theirs, shard(ours, shard_placement_fn=lambda one: ShardPlacementResult(Shard(0), mesh) if one in apart else None)


class Experts(nn.Module):
    """A layer, and a stack of six experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(6, 8, 4))


def on_meshes_that_overlap() -> tuple[Any, Any]:
    """Each rank is in two meshes, of which neither has all ranks of the other."""
    theirs, ours = twins(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    mesh = mesh_of("outer", "inner")
    fully_shard(ours[0], mesh=mesh["inner"])
    return theirs, fully_shard(ours, mesh=mesh["outer"])


def on_three_dims() -> tuple[Any, Any]:
    """Experts are cut over one dimension of the mesh, and each over another, in its second dimension."""
    theirs, ours = twins(Experts)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "experts"))
    up = distribute_tensor(ours.experts.up.detach(), mesh["experts"], [Shard(0)])
    ours.experts.up = nn.Parameter(up)
    fully_shard(ours.experts, mesh=mesh["replicate", "shard"], shard_placement_fn=lambda one: Shard(1))
    return theirs, fully_shard(ours, mesh=mesh["replicate", "shard"])


MESHES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "replicas": replicas,
    "tensor parallel": lambda: tensor_parallel(1, WideBlock),
    "tensor parallel in front": on_spmd_mesh,
    "a mesh of its own": on_own_mesh,
    "meshes that overlap": on_meshes_that_overlap,
    "three dimensions": on_three_dims,
}


@pytest.mark.parametrize("case", MESHES)
@on_four_ranks
def test_parts_on_any_mesh_become_whole_and_parts_again(case: str) -> None:
    theirs, ours = MESHES[case]()
    expected = theirs.state_dict()
    for settings in ({}, {"max_bytes": 900}, {"max_bytes": 900, "pieces": True}, {"dtype": BF16}, {"dst": 3}):
        came = joined(stream_full_params(ours, **settings))
        if settings.get("dst", dist.get_rank()) == dist.get_rank():
            assert_same(came, expected, settings.get("dtype"))
    if case == "replicas":  # only the replica of the one that gets something sends
        sharded = [one for one in ours.parameters() if isinstance(one, DTensor)]
        expected_bytes = sum(one.numel() * 4 for one in sharded) if dist.get_rank() == 3 else 0
        assert _received(lambda: joined(stream_full_params(ours, dst=3))) == expected_bytes
    changed = {name: one + 1 for name, one in expected.items()}
    for src, given in ((None, changed), (2, expected if dist.get_rank() == 2 else {})):
        assert load_full_params(ours, given.items(), src=src) == []
        assert_same(joined(stream_full_params(ours)), expected if src else changed)


@on_three_ranks
def test_groups_that_all_ranks_make_later_are_the_same_on_all() -> None:
    """A stream of a model on two of three ranks makes a process group, of which torch on the third rank does not know."""
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        theirs, ours = twins(lambda: nn.Linear(8, 8))
        fully_shard(ours, mesh=DeviceMesh.from_group(group, "cpu"))
        assert_same(joined(stream_full_params(ours)), theirs.state_dict())
        assert load_full_params(ours, theirs.state_dict().items(), src=2) == []
    found = torch.ones(1)
    dist.all_reduce(found, group=dist.new_group([0, 1, 2]))
    assert found.item() == 3


@pytest.mark.frameworks
@on_two_ranks
def test_float8_weights_come_as_what_they_are_computed_from() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    theirs = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32, bias=False))
    expected = {name: one.clone() for name, one in theirs.state_dict().items()}
    ours = convert_to_float8_training(theirs, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    for layer in ours:
        fully_shard(layer)
    fully_shard(ours)
    for settings in ({}, {"max_bytes": 3000}, {"max_bytes": 3000, "pieces": True}):
        came = joined(stream_full_params(ours, **settings))
        assert_same(came, expected)
        assert {*map(type, came.values())} == {Tensor}
    doubled = {name: 2 * one for name, one in expected.items()}
    assert load_full_params(ours, doubled.items()) == []
    assert_same(joined(stream_full_params(ours)), doubled)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@on_two_ranks
def test_adapters_come_merged_as_peft_merges_them_and_the_model_stays_as_it_was() -> None:
    from peft import LoraConfig, get_peft_model

    from tests.test_hugging_face import inputs, made, sharded

    settings = {
        "llama": LoraConfig(r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], use_dora=True),
        "gpt2": LoraConfig(
            r=3, target_modules=["c_attn"], modules_to_save=["ln_f"], lora_bias=True, fan_in_fan_out=True
        ),
    }

    def adapted(name: str) -> Any:
        model = get_peft_model(made(name), settings[name])
        torch.manual_seed(1)
        for fqn, param in model.named_parameters():
            if "lora_" in fqn or "modules_to_save" in fqn:
                param.data = torch.randn_like(param)
        return model

    for name, dst in (("llama", 1), ("gpt2", None)):
        theirs, ours = adapted(name), sharded(adapted(name), name)
        before = theirs(**inputs(0)).logits
        came = joined(stream_full_params(ours, merge_adapters=True, dst=dst, max_bytes=4000))
        torch.testing.assert_close(ours(**inputs(0)).logits, before, atol=1e-4, rtol=1e-4)
        expected = theirs.merge_and_unload().state_dict()
        assert came.keys() == expected.keys() and not any("lora" in name for name in came)
        if dst in (None, dist.get_rank()):
            torch.testing.assert_close(came, dict(expected), atol=1e-5, rtol=1e-5)
        around = stream_full_params(nn.ModuleDict({"policy": ours}), merge_adapters=True, max_bytes=4000)
        assert {fqn for fqn, _ in around} == {f"policy.base_model.model.{fqn}" for fqn in expected}


@on_two_ranks
def test_mistakes_are_named() -> None:
    ours = shard(twins()[0])
    for error, words, settings in (
        (ValueError, "names has nothing.weight, which the model lacks", {"names": ["nothing.weight"]}),
        (TypeError, "names is a set. Pass a list", {"names": {"norm.weight"}}),
        (ValueError, r"dst=4 is none of the model's ranks, \[0, 1\]", {"dst": 4}),
        (TypeError, "Pass a floating-point dtype", {"dtype": torch.int8}),
        (TypeError, "dtype is 'bf16'. Pass a floating-point dtype", {"dtype": "bf16"}),
        (ValueError, "max_bytes='much' is no number of bytes", {"max_bytes": "much"}),
    ):
        with pytest.raises(error, match=words):
            stream_full_params(ours, **settings)
    for pair, words in (
        (("nothing", torch.ones(1)), "the model has no nothing"),
        (("norm.weight", torch.ones(3, 3)), r"norm.weight has the shape \(16,\), and what came has \(3, 3\)"),
        (("norm.weight", torch.ones(5)), "5 of the 16 rows of norm.weight came, and the others did not"),
    ):
        with pytest.raises(ValueError, match=words):
            load_full_params(ours, [pair])
    with fsdp_compile.full_params(ours), pytest.raises(RuntimeError, match=r"cannot stream weights while .* is a full"):
        stream_full_params(ours)
    ours.layers[0].register_forward_hook(lambda *_: stream_full_params(ours))
    with pytest.raises(RuntimeError, match="Cannot stream weights during forward/backward"):
        ours(torch.zeros(1, 3, dtype=torch.int64))
