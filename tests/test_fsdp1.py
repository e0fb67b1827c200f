"""FSDP1's constructor, argument by argument: beside torch's own on the CPU, and beside the unsharded model."""

from __future__ import annotations

import copy
import os
import runpy
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from fsdp_compile import FSDPModule
from fsdp_compile.core.spec import spec_of
from fsdp_compile.core.unit import unit_of
from fsdp_compile.fsdp1.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from fsdp_compile.lookout.names import Namer
from fsdp_compile.passes.wire.ledger import Issued
from tests.comparing import assert_same_grads, backward_on_both, full, train_steps
from tests.compiling import num_graphs
from tests.fsdp1_scripts import (
    BLOCKS,
    CPU,
    OURS,
    THEIRS,
    Buffered,
    assert_alike,
    features,
    is_block,
    plain,
    silenced,
    train,
    train_unsharded,
    under_theirs,
)
from tests.models import Block, Stack
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks

BF16 = torch.bfloat16
EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp1_moves_in.py"


def hybrid_pair() -> tuple[Any, Any]:
    """Groups in which both ranks share a parameter out, and no other holds a copy."""
    alone = [dist.new_group([rank]) for rank in range(2)]
    return dist.group.WORLD, alone[dist.get_rank()]


def replicas_pair() -> tuple[Any, Any]:
    """The other way around."""
    return tuple(reversed(hybrid_pair()))  # type: ignore[return-value]


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


# What a script passes beside the policy; functions, as groups are made in the workers.
Arguments = Callable[[], dict[str, Any]]

SAME_NUMBERS: dict[str, Arguments] = {
    "process_group": lambda: {"process_group": dist.new_group([0, 1])},
    "device_mesh": lambda: {"device_mesh": mesh(2)},
    "FULL_SHARD": lambda: {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "SHARD_GRAD_OP": lambda: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "HYBRID_SHARD": lambda: {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": hybrid_pair()},
    "_HYBRID_SHARD_ZERO2": lambda: {
        "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "device_mesh": mesh(1, 2)
    },
    "cpu_offload": lambda: {"cpu_offload": CPUOffload(offload_params=True)},
    "of no effect": lambda: {
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True, "limit_all_gathers": False
    },
    "flat parameters": lambda: {"use_orig_params": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, None) for case in SAME_NUMBERS),
        pytest.param("FULL_SHARD", "aot_eager", marks=pytest.mark.compat),
    ],
)
@pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``")
@on_two_ranks
def test_trains_like_torchs_fsdp1_and_the_unsharded_model(case: str, backend: str | None) -> None:
    unsharded = Stack()
    kwargs = SAME_NUMBERS[case]()
    with silenced():
        model = OURS(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, **kwargs)
    ours = train(model, backend)
    assert_alike(ours, train_unsharded(copy.deepcopy(unsharded)))
    if case not in ("flat parameters", "cpu_offload"):  # names differ; torch's copies to a device that is none
        theirs = under_theirs(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, **kwargs)
        assert_alike(ours, train(theirs))
        assert list(model.state_dict()) == list(theirs.state_dict())
        attributes = ("sharding_strategy", "backward_prefetch", "limit_all_gathers", "world_size", "rank")
        assert [getattr(model, name) for name in attributes] == [getattr(theirs, name) for name in attributes]
    assert num_graphs() == (backend is not None)
    placements = {"NO_SHARD": "(Replicate(),)", "HYBRID_SHARD": "(Replicate(), Shard(dim=0))"}
    placements["_HYBRID_SHARD_ZERO2"] = placements["HYBRID_SHARD"]
    assert {str(param.placements) for param in model.parameters()} == {placements.get(case, "(Shard(dim=0),)")}
    keeps = case in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
    assert [unit_of(one.module).regather for one in OURS.fsdp_modules(model)] == [False, not keeps, not keeps]


@on_two_ranks
def test_shards_inside_a_node_and_replicates_over_nodes() -> None:
    """FSDP1 with one rank a node falls back to NO_SHARD and reduces nothing: only the unsharded model is beside it."""
    unsharded = Stack()
    for kwargs in ({"process_group": replicas_pair()}, {"device_mesh": mesh(2, 1)}):
        model = OURS(
            copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **kwargs
        )
        assert (model.world_size, model.rank) == (1, 0)
        assert_alike(train(model), train_unsharded(copy.deepcopy(unsharded)))
    # Without groups: inside a node, of which this is one.
    model = OURS(copy.deepcopy(unsharded), auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert tuple(model._device_mesh.mesh.shape) == (1, 2)


PRECISIONS: dict[str, MixedPrecision] = {
    "compute": MixedPrecision(param_dtype=BF16),
    "reduce": MixedPrecision(reduce_dtype=BF16),
    "compute in bf16, reduce in fp32": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
    "buffers": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
    "low precision gradients": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True),
}


def with_prefix(model: Any, name: str) -> str:
    return next(one for one, _ in model.named_buffers() if one.replace("_fsdp_wrapped_module.", "") == name)


@pytest.mark.parametrize("case", PRECISIONS)
@on_two_ranks
def test_mixed_precision_is_torchs(case: str) -> None:
    """Computing, reducing, buffers, gradients; batch norms stay in fp32, and buffers are saved as they were."""
    original = Buffered()
    seen = []
    for wrapper in (OURS, under_theirs):
        with silenced():
            model = wrapper(
                copy.deepcopy(original), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=PRECISIONS[case]
            )
        seen.append(train(model, inputs=features))
    ours, theirs = seen
    # Gradients in bf16 are within a rounding of one another.
    assert_alike(ours, theirs, atol=4e-3, rtol=2e-2)
    if case != "low precision gradients":  # SGD in bf16 and in fp32 differ by more
        torch.testing.assert_close(ours.losses[:1], theirs.losses[:1], atol=1e-5, rtol=1e-4)
    keeps = case == "low precision gradients"
    # The batch norm is wrapped without mixed precision.
    assert ours.grad_dtypes == ({BF16, torch.float32} if keeps else {torch.float32})
    for name, buffer in original.named_buffers():
        there = dict(ours.model.named_buffers())[name]
        expected = BF16 if case == "buffers" and name == "scale" else buffer.dtype
        assert there.dtype == dict(theirs.model.named_buffers())[with_prefix(theirs.model, name)].dtype == expected
        assert ours.model.state_dict()[name].dtype == buffer.dtype


class Dtypes(nn.Module):
    """Says what it was called with, and hands its inputs on in fp32."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), inner
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, beside: Any) -> Tensor:
        self.seen = [x.dtype, beside["x"].dtype]
        x = x @ self.linear.weight.to(x.dtype)
        return x if self.inner is None else self.inner(x.float(), beside=beside)


@on_two_ranks
def test_the_roots_inputs_are_cast_and_inner_ones_on_request() -> None:
    fp32 = torch.float32
    for fsdp in (OURS, under_theirs):
        for casts, root, inside in (
            ({}, BF16, fp32),
            ({"cast_root_forward_inputs": False}, fp32, fp32),
            ({"cast_forward_inputs": True}, BF16, BF16),
        ):
            precision = MixedPrecision(param_dtype=BF16, **casts)
            inner = fsdp(Dtypes(), mixed_precision=precision)
            model = fsdp(Dtypes(inner), mixed_precision=precision)
            model(torch.ones(2, 4), beside={"x": torch.ones(2)})
            assert model.module.seen == [root, root] and inner.module.seen[0] == inside


POLICIES: dict[str, Any] = {
    "ModuleWrapPolicy": BLOCKS,
    "CustomPolicy": CustomPolicy(is_block),
    "its own arguments": CustomPolicy(lambda module: is_block(module) and {"cpu_offload": CPUOffload()}),
    "lambda": partial(lambda_auto_wrap_policy, lambda_fn=is_block),
    "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": partial(size_based_auto_wrap_policy, min_num_params=600),
    "always": always_wrap_policy,
}


def wrapped_paths(model: Any) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, (OURS, THEIRS))]


@pytest.mark.filterwarnings("ignore:.*containers that do not implement forward")
@on_two_ranks
def test_policies_wrap_what_torchs_fsdp1_wraps() -> None:
    for name, policy in POLICIES.items():
        torch.manual_seed(0)
        unsharded = Stack()
        ours = OURS(copy.deepcopy(unsharded), auto_wrap_policy=policy)
        theirs = under_theirs(copy.deepcopy(unsharded), auto_wrap_policy=policy)
        assert wrapped_paths(ours) == wrapped_paths(theirs), name
        assert_alike(train(ours, steps=1), train(theirs, steps=1))


@on_two_ranks
def test_a_custom_policy_gives_modules_arguments_of_their_own() -> None:
    model = OURS(
        Stack(),
        auto_wrap_policy=CustomPolicy(
            lambda module: is_block(module) and {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "process_group": dist.new_group()}
        ),
    )
    assert [one.sharding_strategy.name for one in OURS.fsdp_modules(model)] == ["FULL_SHARD"] + 2 * ["SHARD_GRAD_OP"]
    assert len({one.process_group.group_name for one in OURS.fsdp_modules(model)}) == 3


def wrapped_by_hand(fsdp: Any) -> Any:
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=fsdp, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        model = nn.Sequential(wrap(nn.Embedding(31, 6)), wrap(nn.Linear(6, 5)), nn.Linear(5, 3))
    return fsdp(model)


@on_two_ranks
def test_enable_wrap_and_wrap_take_our_class() -> None:
    """And the wrapper passes on indices and attributes."""
    ours, theirs = wrapped_by_hand(OURS), wrapped_by_hand(under_theirs)
    assert wrapped_paths(ours) == wrapped_paths(theirs)
    assert type(ours[1]) is OURS and ours[1].out_features == 5 and ours[1].sharding_strategy.name == "SHARD_GRAD_OP"
    assert isinstance(ours[1].module, nn.Linear) and isinstance(ours[1].module, FSDPModule)
    assert_alike(train(ours), train(theirs))


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states", "parameters"])
@on_two_ranks
def test_what_is_ignored_stays_whole(argument: str) -> None:
    """Neither wrapped nor sharded nor reduced: each rank steps by its own gradient, as under FSDP1."""
    original = Stack()
    seen = []
    for wrapper in (OURS, under_theirs):
        model = copy.deepcopy(original)
        chosen = {
            "ignored_modules": [model.head, model.layers[1]],
            "ignored_states": [model.head, model.layers[1]],
            "parameters": [*model.head.parameters(), *model.layers[1].parameters()],
        }[argument]
        wrapped = wrapper(
            model,
            auto_wrap_policy=BLOCKS,
            **{"ignored_states" if argument == "parameters" else argument: chosen},
        )
        kept = {id(param) for part in (model.head, model.layers[1]) for param in part.parameters()}
        names = [name for name, param in wrapped.named_parameters() if id(param) in kept]
        ignored = [name.replace("_fsdp_wrapped_module.", "") for name in names]
        seen.append((wrapped_paths(wrapped), ignored, train(wrapped, steps=1)))
    ours, theirs = seen
    assert ours[:2] == theirs[:2]
    assert len(ours[1]) == 7
    shards = {name for name, param in ours[2].model.named_parameters() if isinstance(param, DTensor)}
    assert shards == {name for name, _ in original.named_parameters()} - set(ours[1])
    assert_alike(ours[2], theirs[2])


@on_two_ranks
def test_what_an_inner_wrapper_ignores_the_outer_one_does() -> None:
    model = Stack()
    model.layers[0] = OURS(model.layers[0], ignored_modules=[model.layers[0].norm])
    names = [name for name, param in OURS(model).named_parameters() if not isinstance(param, DTensor)]
    assert names == ["layers.0.norm.weight", "layers.0.norm.bias"]


@pytest.mark.parametrize("by_function", [False, True])
@on_two_ranks
def test_a_module_on_the_meta_device_gets_values(by_function: bool) -> None:
    """By ``param_init_fn`` or ``reset_parameters``, then those of rank 0; weights that are tied stay so."""

    def fill(module: nn.Module) -> None:
        if any(True for _ in module.parameters(recurse=False)):
            module.to_empty(device=CPU, recurse=False)
            for param in module.parameters(recurse=False):
                nn.init.constant_(param, 0.5 + dist.get_rank())

    with torch.device("meta"):
        model = Stack(tied=True)
    torch.manual_seed(dist.get_rank())
    model = OURS(
        model, auto_wrap_policy=BLOCKS, param_init_fn=fill if by_function else None, sync_module_states=True
    )
    assert model.head.weight is model.embed.weight
    values = {name: full(param.detach()) for name, param in model.named_parameters()}
    if by_function:
        assert all(bool((value == 0.5).all()) for value in values.values())
    else:
        assert bool((values["layers.0.norm.weight"] == 1).all()) and 0.9 < float(values["embed.weight"].std()) < 1.1
    train(model, steps=1)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD])
@on_two_ranks
def test_all_ranks_begin_with_rank_0s_values(strategy: ShardingStrategy) -> None:
    """FSDP1 refuses to on the CPU."""
    first = Buffered()
    torch.manual_seed(dist.get_rank())
    model = Buffered()
    model.scale += dist.get_rank()
    kwargs = {"device_mesh": mesh(2, 1)} if strategy is ShardingStrategy.HYBRID_SHARD else {}
    with silenced():
        model = OURS(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), sync_module_states=True, sharding_strategy=strategy,
            device_id=CPU, **kwargs
        )  # fmt: skip
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        torch.testing.assert_close(full(value.detach()), first.state_dict()[name], rtol=0, atol=0)


MISTAKES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a policy that decides nothing": (
        lambda fsdp: fsdp(Stack(), auto_wrap_policy=CustomPolicy(lambda module: 3)), ValueError, "CustomPolicy"
    ),
    "a missing attribute": (lambda fsdp: fsdp(nn.Linear(2, 2)).nothing, AttributeError, "nothing"),
}  # fmt: skip

OURS_ALONE: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a 2-D mesh that says nothing": (lambda fsdp: fsdp(Stack(), device_mesh=mesh(1, 2)), ValueError, "HYBRID_SHARD to replicate"),
    "no module": (lambda fsdp: fsdp([nn.Linear(2, 2)]), TypeError, "module is a list"),
    "a policy that is none": (lambda fsdp: fsdp(Stack(), auto_wrap_policy={Block}), TypeError, "Pass a function, or a ModuleWrapPolicy"),
    "precision by its dtype": (lambda fsdp: fsdp(Stack(), mixed_precision=BF16), TypeError, "Pass a MixedPrecision"),
    "no mesh": (lambda fsdp: fsdp(Stack(), device_mesh=dist.group.WORLD), TypeError, "Pass a DeviceMesh"),
    "two groups to shard over": (lambda fsdp: fsdp(Stack(), process_group=hybrid_pair()), ValueError, "takes one process group"),
    "an accelerator that is not there": (lambda fsdp: fsdp(Stack(), device_id=0), ValueError, "no accelerator"),
    "a device that is none": (lambda fsdp: fsdp(Stack(), device_id=[]), TypeError, "Pass a torch.device"),
}  # fmt: skip


@on_two_ranks
def test_mistakes_raise_what_fsdp1_raises_and_say_what_to_do() -> None:
    """The types are those of torch's own, which is asked too."""
    for name, (make, kind, said) in (MISTAKES | OURS_ALONE).items():
        with silenced(), pytest.raises(kind, match=said) as raised:
            make(OURS)
        assert type(raised.value) is kind, name
        if name in MISTAKES:
            with silenced(), pytest.raises(kind):
                make(under_theirs)


WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "backward_prefetch": ({"backward_prefetch": None}, "the plan says what backward gathers"),
    "limit_all_gathers": ({"limit_all_gathers": False}, "one gather is launched ahead"),
    "NO_SHARD": ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "replicate"),
    "defaults": ({}, ""),
}


@on_two_ranks
def test_one_warning_says_what_does_it_now() -> None:
    for kwargs, said in WARNINGS.values():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            OURS(Stack(), auto_wrap_policy=BLOCKS, **kwargs)
        texts = [str(one.message) for one in caught if "fsdp1" in one.filename or __file__ == one.filename]
        assert len(texts) == bool(said) and all(said in text for text in texts), texts
        assert all(one.filename == __file__ for one in caught), "points at the caller"


@on_two_ranks
def test_a_group_of_one_rank_is_not_sharded() -> None:
    unsharded = Stack()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.warns(UserWarning, match="since the world size is 1"):
        model = OURS(copy.deepcopy(unsharded), process_group=alone)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert_alike(train(model), train(under_theirs(copy.deepcopy(unsharded), process_group=alone)))


class Calls(nn.Module):
    """Calls the members of a list."""

    def __init__(self, members: nn.Module) -> None:
        super().__init__()
        self.embed, self.members = nn.Embedding(31, 6), members

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for member in self.members.children():
            x = member(x)
        return x


@on_two_ranks
def test_a_list_without_forward_is_one_unit() -> None:
    """With a warning; under FSDP1 its members would compute with shards."""
    unsharded = Calls(nn.ModuleList(nn.Linear(6, 6) for _ in range(2)))
    model = copy.deepcopy(unsharded)
    with pytest.warns(UserWarning, match="members of this ModuleList are one unit"):
        members = OURS(model.members)
    assert all(isinstance(param, DTensor) for param in members.parameters())
    model.members = members.module
    assert_alike(train(OURS(model)), train_unsharded(unsharded))


@on_two_ranks
def test_ties_that_wrappers_would_cut_are_refused() -> None:
    with torch.device("meta"):
        model = Stack(2, tied=True)
    policy = ModuleWrapPolicy({Block, nn.Embedding})
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight"):
        OURS(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    assert model.embed.weight is model.head.weight and model.embed.weight.is_meta


@on_two_ranks
def test_the_wrapper_hides_no_attribute_of_the_users() -> None:
    model = OURS(Stack(1))
    model.module.unit, model.module.device_mesh, model.module.ignored = "kelvin", "coarse", "none"
    assert (model.unit, model.device_mesh, model.ignored) == ("kelvin", "coarse", "none")


@on_two_ranks
def test_an_optimizer_that_was_built_before_wrapping_trains_the_model() -> None:
    """Beside torch's, whose parameters stay the objects that they were."""
    losses: list[list[float]] = []
    for fsdp in (under_theirs, OURS):
        torch.manual_seed(0)
        module = Stack(2, tied=True)
        optim = torch.optim.AdamW([{"params": [one]} for one in module.parameters()], lr=1e-2)
        with silenced():
            model = fsdp(module, auto_wrap_policy=BLOCKS)
        losses.append(train_steps(model, optim, range(3)))
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-4)
    # One that goes on by state of whole parameters cannot train shards, and says so.
    module = Stack(2)
    optim = torch.optim.AdamW(module.parameters())
    train_steps(module, optim, (0,))
    with pytest.warns(UserWarning, match="had taken steps already"):
        OURS(module)


@on_two_ranks
def test_a_module_is_wrapped_again() -> None:
    unsharded = plain()
    with silenced():
        inner = plain()
        first = OURS(inner, auto_wrap_policy=BLOCKS)
        backward_on_both(first, unsharded, 0)
        again = OURS(inner, device_id="cpu")
        backward_on_both(again, unsharded, 1)
    assert list(again.state_dict()) == list(first.state_dict()) == list(unsharded.state_dict())
    assert_same_grads(again, unsharded)
    of_blocks = {id(param) for param in inner.layers.parameters()}
    assert [id(param) for param in again.params] == [id(one) for one in inner.parameters() if id(one) not in of_blocks]
    with pytest.raises(AssertionError, match="sharded or replicated already"), silenced():
        OURS(inner, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("third", torch.full((4,), 1 / 3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.seen = [x.dtype, y.dtype, self.third.dtype]
        return y + self.third.to(y.dtype)


HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def check_evaluation(cls: Any, asked: str) -> list[Any]:
    seen: list[Any] = []
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": asked}), silenced():
        model = cls(nn.Sequential(cls(WithBuffer(), mixed_precision=HALF), nn.Linear(4, 4)), mixed_precision=HALF)
    x = torch.linspace(0, 1, 8).reshape(2, 4)
    for trains in (True, False, True):
        out = model.train(trains)(x)
        seen.append((model.module[0].module.seen, out.dtype))
        out.float().sum().backward()
        model.zero_grad()
    if cls is OURS:
        run = torch.compile(model.eval(), backend="aot_eager")
        torch.testing.assert_close(run(x), model(x))
        assert model(x).dtype == (torch.float32 if asked == "1" else torch.bfloat16)
    return seen


@pytest.mark.parametrize("asked", ["0", "1"])
@on_two_ranks
def test_evaluation_in_full_precision_is_asked_for_by_the_environment(asked: str) -> None:
    theirs = check_evaluation(under_theirs, asked)
    assert check_evaluation(OURS, asked) == theirs
    assert (theirs[1] != theirs[0]) == (asked == "1")


@on_two_ranks
def test_a_wrapper_that_ignores_its_module_casts_no_buffer() -> None:
    inner = WithBuffer()
    with silenced():
        wrapped = OURS(inner, mixed_precision=HALF, ignored_modules=[inner])
        OURS(nn.Sequential(wrapped, nn.Linear(4, 4)), mixed_precision=HALF)
    assert torch.equal(inner.third, torch.full((4,), 1 / 3)) and inner.third.dtype == torch.float32


def places_of_params() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """This rank ignores as many modules as its number, and one more."""
    rank = dist.get_rank()
    inner = nn.Sequential(*(nn.Linear(4, 4) for _ in range(rank + 3)))
    with silenced():
        model = OURS(nn.Sequential(inner), ignored_modules=list(inner)[1:-1])
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    unit = model._unit
    specs = [spec_of(unit, param) for param in unit.params]
    issued = Issued("all_gather", specs, unit.mesh.group, 0, None, weakref.ref(unit))
    link = Namer().of_launch(issued)
    return link.names, link.whose


def test_ranks_that_ignore_other_modules_agree_about_the_rest(two_ranks: Ranks) -> None:
    (names, places), (other_names, other_places) = two_ranks.run(places_of_params)
    assert names != other_names and places == other_places and len(places) == 4


@on_two_ranks
def test_the_examples_script_trains_alike_under_either_class() -> None:
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = nn.Sequential(example["Block"](), nn.Linear(example["WIDTH"], example["WIDTH"]))
    with silenced():
        theirs, ours = (example["script"](fsdp, copy.deepcopy(model), False) for fsdp in (THEIRS, OURS))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert ours[-1] < ours[0]
