"""FSDP1's constructor, argument by argument: beside torch's own on the CPU, and beside the unsharded model."""

from __future__ import annotations

import copy
import runpy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor

from fsdp_compile import FSDPModule
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
from tests.comparing import full
from tests.compiling import num_graphs
from tests.fsdp1_scripts import (
    CPU,
    OURS,
    THEIRS,
    Attends,
    Buffered,
    assert_alike,
    decoder,
    features,
    is_block,
    silenced,
    train,
    train_unsharded,
    under_theirs,
)
from tests.models import Block, Stack
from tests.ranks import Ranks

BLOCKS = ModuleWrapPolicy({Block})
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
    "nothing": dict,
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
    "BACKWARD_POST": lambda: {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "forward_prefetch": lambda: {"forward_prefetch": True},
    "limit_all_gathers": lambda: {"limit_all_gathers": False},
    "flat parameters": lambda: {"use_orig_params": False},
}  # fmt: skip


def check_numbers(case: str, backend: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
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
    return {
        "graphs": num_graphs(),
        "placements": {str(param.placements) for param in model.parameters() if isinstance(param, DTensor)},
        "regathers": [unit_of(one.module).regather for one in OURS.fsdp_modules(model)],
    }


def more(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.more)


COMPILED = ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "cpu_offload")


@pytest.mark.parametrize(
    ("case", "backend"),
    [*((case, None) for case in SAME_NUMBERS), pytest.param("nothing", "aot_eager", marks=pytest.mark.compat), *(more(case, "aot_eager") for case in COMPILED)],
)
@pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``")
def test_trains_like_torchs_fsdp1_and_the_unsharded_model(two_ranks: Ranks, case: str, backend: str | None) -> None:
    for seen in two_ranks.run(check_numbers, case, backend):
        assert seen["graphs"] == (backend is not None)
        expected = {"NO_SHARD": "(Replicate(),)", "HYBRID_SHARD": "(Replicate(), Shard(dim=0))"}
        expected["_HYBRID_SHARD_ZERO2"] = expected["HYBRID_SHARD"]
        assert seen["placements"] == {expected.get(case, "(Shard(dim=0),)")}
        keeps = case in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
        assert seen["regathers"] == [False, not keeps, not keeps]


def check_replicas() -> None:
    torch.manual_seed(0)
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


def test_shards_inside_a_node_and_replicates_over_nodes(two_ranks: Ranks) -> None:
    """FSDP1 with one rank a node falls back to NO_SHARD and reduces nothing: only the unsharded model is beside it."""
    two_ranks.run(check_replicas)


# --- mixed precision -----------------------------------------------------------------------------------------------

PRECISIONS: dict[str, MixedPrecision] = {
    "compute": MixedPrecision(param_dtype=BF16),
    "reduce": MixedPrecision(reduce_dtype=BF16),
    "compute in bf16, reduce in fp32": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
    "buffers": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
    "low precision gradients": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=True),
}


def check_precision(case: str, backend: str | None) -> None:
    torch.manual_seed(0)
    original = Buffered()
    seen = []
    for wrapper in (OURS, under_theirs):
        with silenced():
            model = wrapper(
                copy.deepcopy(original), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=PRECISIONS[case]
            )
        seen.append(train(model, backend if wrapper is OURS else None, inputs=features))
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


def with_prefix(model: Any, name: str) -> str:
    return next(one for one, _ in model.named_buffers() if one.replace("_fsdp_wrapped_module.", "") == name)


@pytest.mark.parametrize(
    ("case", "backend"),
    [*((case, None) for case in PRECISIONS), more("buffers", "aot_eager"), more("low precision gradients", "aot_eager")],
)
def test_mixed_precision_is_torchs(two_ranks: Ranks, case: str, backend: str | None) -> None:
    """Computing, reducing, buffers, gradients; batch norms stay in fp32, and buffers are saved as they were."""
    two_ranks.run(check_precision, case, backend)


class Dtypes(nn.Module):
    """Says what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, beside: Any = None) -> Tensor:
        self.seen = [x.dtype, beside["x"].dtype]
        return x @ self.linear.weight.to(x.dtype)


def check_casts(fsdp: Any) -> dict[str, list[torch.dtype]]:
    seen = {}
    for name, casts in {
        "default": {}, "none": {"cast_root_forward_inputs": False},
        "all": {"cast_forward_inputs": True},
    }.items():  # fmt: skip
        precision = MixedPrecision(param_dtype=BF16, **casts)
        inner = fsdp(Dtypes(), mixed_precision=precision)
        model = fsdp(Around(inner), mixed_precision=precision)
        model(torch.ones(2, 4), beside={"x": torch.ones(2)})
        seen[name] = [model.module.seen, inner.module.seen[0]]
    return seen


class Around(Dtypes):
    """Hands its inputs on in fp32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *, beside: Any = None) -> Tensor:
        super().forward(x, beside=beside)
        return self.inner(x.float(), beside=beside)


def test_the_roots_inputs_are_cast_and_inner_ones_on_request(two_ranks: Ranks) -> None:
    fp32 = torch.float32
    expected = {"default": [[BF16, BF16], fp32], "none": [[fp32, fp32], fp32], "all": [[BF16, BF16], BF16]}
    assert two_ranks.run(check_casts, OURS) == [expected] * 2
    assert two_ranks.run(check_casts, under_theirs) == [expected] * 2


# --- which modules, which parameters -------------------------------------------------------------------------------

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


def check_policies() -> None:
    for name, policy in POLICIES.items():
        torch.manual_seed(0)
        unsharded = Stack()
        ours = OURS(copy.deepcopy(unsharded), auto_wrap_policy=policy)
        theirs = under_theirs(copy.deepcopy(unsharded), auto_wrap_policy=policy)
        assert wrapped_paths(ours) == wrapped_paths(theirs), name
        assert_alike(train(ours, steps=1), train(theirs, steps=1))


@pytest.mark.filterwarnings("ignore:.*containers that do not implement forward")
def test_policies_wrap_what_torchs_fsdp1_wraps(two_ranks: Ranks) -> None:
    two_ranks.run(check_policies)


def check_kept_apart() -> None:
    torch.manual_seed(0)
    model = OURS(
        Stack(),
        auto_wrap_policy=CustomPolicy(
            lambda module: is_block(module) and {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "process_group": dist.new_group()}
        ),
    )
    assert [one.sharding_strategy.name for one in OURS.fsdp_modules(model)] == ["FULL_SHARD"] + 2 * ["SHARD_GRAD_OP"]
    assert len({one.process_group.group_name for one in OURS.fsdp_modules(model)}) == 3


def test_a_custom_policy_gives_modules_arguments_of_their_own(two_ranks: Ranks) -> None:
    two_ranks.run(check_kept_apart)


def wrapped_by_hand(fsdp: Any) -> Any:
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=fsdp, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        model = nn.Sequential(wrap(nn.Embedding(31, 6)), wrap(nn.Linear(6, 5)), nn.Linear(5, 3))
    return fsdp(model)


def check_wrap() -> None:
    ours, theirs = wrapped_by_hand(OURS), wrapped_by_hand(under_theirs)
    assert wrapped_paths(ours) == wrapped_paths(theirs)
    assert type(ours[1]) is OURS and ours[1].out_features == 5 and ours[1].sharding_strategy.name == "SHARD_GRAD_OP"
    assert isinstance(ours[1].module, nn.Linear) and isinstance(ours[1].module, FSDPModule)
    assert_alike(train(ours), train(theirs))


def test_enable_wrap_and_wrap_take_our_class(two_ranks: Ranks) -> None:
    """And the wrapper passes on indices and attributes."""
    two_ranks.run(check_wrap)


def check_ignored(argument: str) -> None:
    torch.manual_seed(0)
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


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states", "parameters"])
def test_what_is_ignored_stays_whole(two_ranks: Ranks, argument: str) -> None:
    """Neither wrapped nor sharded nor reduced: each rank steps by its own gradient, as under FSDP1."""
    two_ranks.run(check_ignored, argument)


def check_inner_ignored() -> None:
    model = Stack()
    model.layers[0] = OURS(model.layers[0], ignored_modules=[model.layers[0].norm])
    names = [name for name, param in OURS(model).named_parameters() if not isinstance(param, DTensor)]
    assert names == ["layers.0.norm.weight", "layers.0.norm.bias"]


def test_what_an_inner_wrapper_ignores_the_outer_one_does(two_ranks: Ranks) -> None:
    two_ranks.run(check_inner_ignored)


# --- values before the first step ----------------------------------------------------------------------------------


def check_meta(by_function: bool) -> None:
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


@pytest.mark.parametrize("by_function", [False, True])
def test_a_module_on_the_meta_device_gets_values(two_ranks: Ranks, by_function: bool) -> None:
    """By ``param_init_fn`` or ``reset_parameters``, then those of rank 0; weights that are tied stay so."""
    two_ranks.run(check_meta, by_function)


def check_synced(strategy: ShardingStrategy) -> None:
    torch.manual_seed(0)
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


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD])
def test_all_ranks_begin_with_rank_0s_values(two_ranks: Ranks, strategy: ShardingStrategy) -> None:
    """FSDP1 refuses to on the CPU."""
    two_ranks.run(check_synced, strategy)


# --- what is said --------------------------------------------------------------------------------------------------

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


def check_mistakes() -> None:
    for name, (make, kind, said) in (MISTAKES | OURS_ALONE).items():
        with silenced(), pytest.raises(kind, match=said) as raised:
            make(OURS)
        assert type(raised.value) is kind, name
        if name in MISTAKES:
            with silenced(), pytest.raises(kind):
                make(under_theirs)


def test_mistakes_raise_what_fsdp1_raises_and_say_what_to_do(two_ranks: Ranks) -> None:
    """The types are those of torch's own, which is asked too."""
    two_ranks.run(check_mistakes)


WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "backward_prefetch": ({"backward_prefetch": None}, "the plan says what backward gathers"),
    "limit_all_gathers": ({"limit_all_gathers": False}, "one gather is launched ahead"),
    "NO_SHARD": ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "replicate"),
    "defaults": ({}, ""),
}


def check_warnings() -> None:
    for kwargs, said in WARNINGS.values():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            OURS(Stack(), auto_wrap_policy=BLOCKS, **kwargs)
        texts = [str(one.message) for one in caught if "fsdp1" in one.filename or __file__ == one.filename]
        assert len(texts) == bool(said) and all(said in text for text in texts), texts
        assert all(one.filename == __file__ for one in caught), "points at the caller"


def test_one_warning_says_what_does_it_now(two_ranks: Ranks) -> None:
    two_ranks.run(check_warnings)


def check_one_rank() -> None:
    torch.manual_seed(0)
    unsharded = Stack()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.warns(UserWarning, match="since the world size is 1"):
        model = OURS(copy.deepcopy(unsharded), process_group=alone)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert_alike(train(model), train(under_theirs(copy.deepcopy(unsharded), process_group=alone)))


def test_a_group_of_one_rank_is_not_sharded(two_ranks: Ranks) -> None:
    two_ranks.run(check_one_rank)


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


def check_container() -> None:
    torch.manual_seed(0)
    unsharded = Calls(nn.ModuleList(nn.Linear(6, 6) for _ in range(2)))
    model = copy.deepcopy(unsharded)
    with pytest.warns(UserWarning, match="members of this ModuleList are one unit"):
        members = OURS(model.members)
    assert all(isinstance(param, DTensor) for param in members.parameters())
    model.members = members.module
    assert_alike(train(OURS(model)), train_unsharded(unsharded))


def test_a_list_without_forward_is_one_unit(two_ranks: Ranks) -> None:
    """With a warning; under FSDP1 its members would compute with shards."""
    two_ranks.run(check_container)


# --- the example ---------------------------------------------------------------------------------------------------


def check_example() -> list[list[float]]:
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = nn.Sequential(example["Block"](), nn.Linear(example["WIDTH"], example["WIDTH"]))
    with silenced():
        return [example["script"](fsdp, copy.deepcopy(model), False) for fsdp in (THEIRS, OURS)]


def test_the_examples_script_trains_alike_under_either_class(two_ranks: Ranks) -> None:
    for theirs, ours in two_ranks.run(check_example):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert ours[-1] < ours[0]


# --- the whole of it on Inductor -----------------------------------------------------------------------------------


def check_inductor() -> None:
    torch.manual_seed(0)
    unsharded = decoder()
    policy = ModuleWrapPolicy({Attends})
    with torch._inductor.config.patch(fallback_random=True, compile_threads=1):
        ours = train(OURS(copy.deepcopy(unsharded), auto_wrap_policy=policy), "inductor", steps=3, seed=7)
    assert num_graphs() == 1
    assert ours.model.head.weight is ours.model.embed.weight
    theirs = train(under_theirs(copy.deepcopy(unsharded), auto_wrap_policy=policy), steps=3, seed=7)
    assert_alike(ours, theirs, atol=1e-5)
    assert_alike(ours, train_unsharded(unsharded, steps=3, seed=7), atol=1e-5)


@pytest.mark.more
def test_a_decoder_trains_in_one_graph_on_inductor(two_ranks: Ranks) -> None:
    """Biases, norms, dropout and tied weights with ``fullgraph=True``, beside torch's FSDP1 and the unsharded model."""
    two_ranks.run(check_inductor)
