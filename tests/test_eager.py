"""The eager path does what FSDP2's users know: every setter of FSDPModule, against the unsharded model."""

from __future__ import annotations

import copy
import functools
import gc
import re
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compile
from fsdp_compile import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
from fsdp_compile.core.unit import unit_of, units_in
from fsdp_compile.eager.running import running
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    backward_on_both,
    batches,
    full,
    local_loss,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import compile_blocks
from tests.models import Block, HalfUsed, Stack, mesh_of, one_unit, pair, shard, twins
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.recording import GATHER, REDUCE, Collectives, Wire, held_bytes, let_threads_rest


def assert_same_accumulated(model: nn.Module, unsharded: nn.Module, steps: range) -> None:
    unsharded.zero_grad()
    for step in steps:
        reference_backward(unsharded, batches(step))
    assert_same_grads(model, unsharded)


# --- what a user of FSDP2 looks for


@pytest.mark.compat
@on_two_ranks
def test_it_is_fsdp2s_class_and_inherits_no_method_of_it() -> None:
    import torch.distributed.fsdp as torch_fsdp

    _, model = pair()
    assert isinstance(model, FSDPModule) and isinstance(model, torch_fsdp.FSDPModule)
    assert not isinstance(model.norm, torch_fsdp.FSDPModule)
    theirs = {name for name, value in vars(torch_fsdp.FSDPModule).items() if callable(value)}
    inherited = {name for name in theirs if getattr(type(model), name) is getattr(torch_fsdp.FSDPModule, name)}
    assert not inherited - {"__doc__", "__module__"}, inherited


# --- unshard, reshard


@on_two_ranks
def test_unshard_and_reshard_show_in_reads() -> None:
    unsharded, model = pair()
    layer = model.layers[0]
    assert layer.unshard() is None
    assert not isinstance(layer.up.weight, DTensor)
    torch.testing.assert_close(layer.up.weight, unsharded.layers[0].up.weight)
    assert isinstance(dict(model.named_parameters())["layers.0.up.weight"], DTensor)
    layer.reshard()
    assert isinstance(layer.up.weight, DTensor)
    handles = [one.unshard(async_op=True) for one in model.layers]
    for handle in handles:
        assert handle is not None
        handle.wait()
        handle.wait()
    with Collectives() as seen:
        loss = local_loss(model, 0)
        layer.unshard()
        torch.testing.assert_close(layer.up.weight, unsharded.layers[0].up.weight)
        loss.backward()  # frees: what is read is gathered again
        torch.testing.assert_close(layer.up.weight, unsharded.layers[0].up.weight)
    assert seen.count(GATHER) > 0
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)


@on_two_ranks
def test_a_table_that_is_gathered_anew_is_read_anew() -> None:
    embed = fully_shard(nn.Embedding(6, 4))
    embed.unshard()
    before = embed.weight.sum().item()
    with torch.no_grad():
        for param in embed.parameters():
            param.add_(1)
    embed.unshard()
    assert abs(embed.weight.sum().item() - before - 24) < 1e-3


@on_two_ranks
def test_what_was_gathered_before_a_step_is_not_used_after_it() -> None:
    unsharded, model = pair()
    optim, reference = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, unsharded))
    for step in range(3):
        for layer in model.layers:
            layer.unshard()  # and no reshard: what was gathered before the optimizer's step must not be used after it
        backward_on_both(model, unsharded, step)
        assert_same_grads(model, unsharded)
        model.layers[0].unshard()
        for one in (optim, reference):
            one.step()
            one.zero_grad()


# --- when parameters are gathered and freed


@on_two_ranks
def test_reshard_after_forward_decides_what_backward_gathers() -> None:
    gathers = {}
    for reshard in (False, True, None):
        _, model = pair(reshard_after_forward=reshard)
        local_loss(model, 0).backward()
        with Collectives() as forward:
            loss = local_loss(model, 1)
        with Collectives() as backward:
            loss.backward()
        gathers[reshard] = forward.count(GATHER), backward.count(GATHER)
    in_forward, in_backward = gathers[True]
    assert in_forward == in_backward + 1 and gathers[False][1] == 0  # the embedding is in a bucket of its own
    assert gathers[None][0] == in_forward and 0 < gathers[None][1] < in_forward  # the root is kept


@on_two_ranks
def test_parameters_may_stay_gathered_between_micro_batches() -> None:
    unsharded, model = pair(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    local_loss(model, 0).backward()
    with Collectives() as seen:
        local_loss(model, 1).backward()
    assert seen.count(GATHER) == 0, "parameters stay gathered between micro-batches"
    assert_same_accumulated(model, unsharded, range(2))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with Collectives() as seen:
        local_loss(model, 2)
    assert seen.count(GATHER) > 0


def _pair_that_trains(pattern: str) -> tuple[Stack, Stack]:
    """Parameters whose names do not match are frozen in both."""
    unsharded, model = pair()
    for one in (unsharded, model):
        for name, param in one.named_parameters():
            param.requires_grad_(re.search(pattern, name) is not None)
    return unsharded, model


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_a_frozen_parameter_stays_until_backward_has_read_it(backend: str | None) -> None:
    """The root's frozen norm is read by backward after the gradient of its head came, and no input asks for one."""
    unsharded, model = _pair_that_trains(r"^(head|layers\.1\.)")
    if backend is not None:
        compile_blocks(model, backend)
    backward_on_both(model, unsharded, 0, 1)
    assert_same_grads(model, unsharded)
    assert held_bytes(model) == 0


@pytest.mark.parametrize("trainable", ["bias$", "^embed"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@on_two_ranks
def test_frozen_units_are_freed_when_backward_leaves_them(trainable: str) -> None:
    unsharded, model = _pair_that_trains(trainable)
    held: list[int] = []
    model.layers[0].register_full_backward_hook(lambda *unused: held.append(held_bytes(model)))
    backward_on_both(model, unsharded, 0, 1)
    assert_same_grads(model, unsharded)
    one_layer = sum(param.numel() for param in unsharded.layers[0].parameters()) * 4
    # At the first layer's end only it and the root, which is kept, may be there: not the layers behind it.
    root = sum(param.numel() for name, param in unsharded.named_parameters() if not name.startswith("layers")) * 4
    padding = 256
    assert max(held) <= root + one_layer + padding, (held, root, one_layer)
    assert held_bytes(model) == 0


def _fulls(layer: Any) -> list[Tensor]:
    gathered = running(unit_of(layer)).gathered
    assert gathered is not None and gathered.fulls is not None
    return gathered.fulls


@on_two_ranks
def test_kept_storage_has_stable_addresses() -> None:
    unsharded, model = pair()
    model.set_keep_unsharded_storage(True)
    local_loss(model, 0).backward()
    addresses = [full.data_ptr() for layer in model.layers for full in _fulls(layer)]
    local_loss(model, 1).backward()
    assert addresses == [full.data_ptr() for layer in model.layers for full in _fulls(layer)]
    assert_same_accumulated(model, unsharded, range(2))


# --- gradients


@on_two_ranks
def test_a_bucket_is_reduced_when_its_gradients_are_there() -> None:
    """Of a model whose head is so large that it travels alone; test_sequence.py compares launches with a graph's."""
    unsharded, model = pair(make=lambda: Stack(2, vocab=1 << 14))
    for step in range(3):
        model.zero_grad()
        loss = local_loss(model, step)
        with Wire() as wire:
            loss.backward()
    assert_same_accumulated(model, unsharded, range(2, 3))
    assert wire.calls["all_to_all"] == 5  # head, two layers, embedding, norm


@on_two_ranks
def test_gradients_accumulate_without_communication() -> None:
    unsharded, model = pair(make=lambda: Stack(tied=True))
    with Collectives() as seen:
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            local_loss(model, step).backward()
            if step < 2:
                assert seen.count(REDUCE) == 0
                assert all(param.grad is None for param in model.parameters())
    synced = sum(size for name, size in seen.seen if name == REDUCE)
    assert_same_accumulated(model, unsharded, range(3))
    model.zero_grad()
    with Collectives() as seen:
        local_loss(model, 3).backward()
    assert synced == sum(size for name, size in seen.seen if name == REDUCE), "one reduction for three micro-batches"
    assert_same_accumulated(model, unsharded, range(3, 4))


@on_two_ranks
def test_unused_parameters_get_zeros_on_request() -> None:
    unsharded, model = pair(make=HalfUsed)
    unsharded.skip = model.skip = True
    model.set_reduce_scatter_unused_params(True)
    backward_on_both(model, unsharded, 0)
    for param in unsharded.layers[1].parameters():
        param.grad = torch.zeros_like(param)
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize(("is_compiled", "behind_forward"), [(False, False), (False, True), (True, True)])
@on_two_ranks
def test_a_divide_factor_of_ones_own(is_compiled: bool, behind_forward: bool) -> None:
    """It may be known behind forward alone, as the number of tokens is. On gloo all reductions are sums as it is."""
    unsharded, model = pair()
    model.set_force_sum_reduction_for_comms(not behind_forward, recurse=True)
    if is_compiled:
        compile_blocks(model)
    for step, factor in enumerate((1.0, 5.0)):
        model.zero_grad()
        unsharded.zero_grad()
        if not behind_forward:
            model.set_gradient_divide_factor(factor, recurse=True)
        loss = local_loss(model, step)
        if behind_forward:
            model.set_gradient_divide_factor(factor, recurse=True)
        loss.backward()
        reference_backward(unsharded, batches(step))
        for param in unsharded.parameters():
            param.grad.mul_(dist.get_world_size() / factor)
        assert_same_grads(model, unsharded)


# --- collectives of one's own


class PlainAllGather:
    """FSDP2's protocol, with torch's own collective."""

    def __init__(self) -> None:
        self.num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        self.num_calls += 1
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)


class PlainReduceScatter(PlainAllGather):
    def __call__(  # type: ignore[override]
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.num_calls += 1
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)


@on_two_ranks
def test_collectives_and_hooks_of_ones_own() -> None:
    unsharded, model = pair()
    gather, scatter, seen = PlainAllGather(), PlainReduceScatter(), []
    layer = model.layers[1]
    layer.set_custom_all_gather(gather)
    layer.set_custom_reduce_scatter(scatter)
    model.layers[0].set_all_reduce_hook(lambda grads: seen.append(grads.mul_(3).numel()))
    backward_on_both(model, unsharded, 0)
    for param in unsharded.layers[0].parameters():
        param.grad.mul_(3)
    assert_same_grads(model, unsharded)
    assert gather.num_calls and scatter.num_calls and seen


# --- many micro-batches


@pytest.mark.parametrize(("async_op", "sync"), [(True, False), (False, True)])
@on_two_ranks
def test_backward_is_finalized_by_hand(async_op: bool, sync: bool) -> None:
    unsharded, model = pair()
    for round in range(2):
        model.set_manual_backward_finalization(True)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(sync)
        for step in range(2):
            local_loss(model, 2 * round + step).backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            with pytest.raises(RuntimeError, match="wait"):
                model(mine(0))
            handle.wait()
        else:
            assert handle is None
        model.set_manual_backward_finalization(False)
        assert held_bytes(model) == 0
    assert_same_accumulated(model, unsharded, range(4))


@on_two_ranks
def test_two_roots_share_a_context() -> None:
    """And a reset of one leaves the other alone."""
    unsharded, model = pair()
    other_unsharded, other = pair(seed=1)
    share_comm_ctx([model, other])
    share_comm_ctx([])
    for step in range(2):
        (local_loss(model, step) + local_loss(other, step)).backward()
    assert_same_accumulated(model, unsharded, range(2))
    assert_same_accumulated(other, other_unsharded, range(2))
    model.zero_grad()
    model.set_is_last_backward(False)
    local_loss(model, 0).backward()
    other.reset_iter_state()  # the reductions of the first one go on
    model.set_is_last_backward(True)
    local_loss(model, 1).backward()
    assert_same_accumulated(model, unsharded, range(2))


@on_four_ranks
def test_replicas_are_summed_once_for_several_micro_batches() -> None:
    mesh = mesh_of("replicate", "shard")
    unsharded, model = pair(mesh=mesh)
    for round in range(2):
        with Collectives() as seen:
            for step in range(3):
                model.set_requires_all_reduce(step == 2)
                local_loss(model, 3 * round + step).backward()
                if step < 2 and round == 0:
                    assert seen.count("all_reduce") == 0 and seen.count(REDUCE) > 0
                    assert all(param.grad is None for param in model.parameters())
        assert 0 < seen.count("all_reduce") <= 4, "one for each unit"
    assert_same_accumulated(model, unsharded, range(6))
    # A flag that says "no communication" at all does not undo the other one.
    model.zero_grad()
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(True)
    local_loss(model, 0).backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_all_reduce(True)
    local_loss(model, 1).backward()
    assert_same_accumulated(model, unsharded, range(2))


@on_four_ranks
def test_backward_gathers_over_few_ranks_after_an_int() -> None:
    """Slices of before a step are not read after it."""
    unsharded, model = pair(reshard_after_forward=2)
    local_loss(model, 0)  # leaves slices, which no backward reads; after a step they are not read either
    with torch.no_grad():
        for one in (unsharded, model):
            for param in one.parameters():
                param.mul_(0.5)
    torch.testing.assert_close(model(mine(0)), unsharded(mine(0)))
    train_and_compare(model, model, unsharded)
    inner = {unit.post_forward.group for unit in units_in(model) if unit.post_forward is not None}
    groups: list[str] = []

    class Groups(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if GATHER in func.__name__ and func.namespace in ("fsdpc", "_c10d_functional"):
                groups.append(args[2])
            return func(*args, **(kwargs or {}))

    with Groups():
        loss = local_loss(model, 0)
        in_forward = set(groups)
        groups.clear()
        loss.backward()
    assert not in_forward & inner
    assert groups and set(groups) <= inner, (groups, inner)


@on_two_ranks
def test_an_embedding_need_not_be_gathered_for_backward() -> None:
    unsharded, model = twins()
    fully_shard(model.embed, reshard_after_forward=True)
    model.embed.set_unshard_in_backward(False)
    shard(model)
    local_loss(model, 0).backward()
    rows = 16
    with Collectives() as forward:
        loss = local_loss(model, 1)
    with Collectives() as backward:
        loss.backward()
    assert any(size == rows * 16 for _, size in forward.seen)
    assert not any(name == GATHER and size == rows * 16 for name, size in backward.seen)
    assert_same_accumulated(model, unsharded, range(2))


@on_two_ranks
def test_double_backward_through_inputs_works_and_through_parameters_is_refused() -> None:
    unsharded, model = one_unit(Block, reshard_after_forward=True)
    x = torch.ones(3, 16) * (1 + dist.get_rank())
    for one, inputs in ((model, [x]), (unsharded, [torch.ones(3, 16), 2 * torch.ones(3, 16)])):
        for value in inputs:
            value = value.clone().requires_grad_()
            (slope,) = torch.autograd.grad(one(value).pow(2).sum(), value, create_graph=True)
            (slope.pow(2).sum() / len(inputs)).backward()
    assert_same_grads(model, unsharded, rtol=1e-3)
    assert held_bytes(model) == 0
    with pytest.raises(RuntimeError, match=r"up\.weight|up\.bias|down\.weight|down\.bias.*create_graph=True"):
        torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()), create_graph=True)


# --- other entries than forward, and what it returns


class WithBody(Stack):
    def body(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@on_two_ranks
def test_another_method_as_forward() -> None:
    unsharded, model = twins(WithBody)
    shard(model)
    register_fsdp_forward_method(model, "body")
    register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not sharded: nothing to do
    model.body(mine()).pow(2).mean().backward()
    torch.stack([unsharded.body(batch).pow(2).mean() for batch in batches(0)]).mean().backward()
    assert_same_grads(model, unsharded)
    type(unsharded).device_of = lambda self, x: x.device  # type: ignore[attr-defined]
    register_fsdp_forward_method(model, "device_of")
    unit_of(model).takes_inputs_to = torch.device("meta")  # type: ignore[union-attr]
    assert model.device_of(torch.ones(2)).type == "meta"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_two_ranks
def test_a_method_that_the_module_was_given() -> None:
    """As ``module.encode = torch.compile(module.encode)`` puts one, or a wrapper that hands on what it has not."""
    unsharded, model = twins(Encoder)
    model.encode = types.MethodType(lambda self, x: self.linear(x) + 1, model)
    fully_shard(model)
    model.other = functools.partial(lambda its, x: its.linear(x) + 2, model)
    for name in ("encode", "other", "encode", "other"):  # the second time for nothing
        register_fsdp_forward_method(model, name)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model.encode(x), unsharded.encode(x) + 1)
    torch.testing.assert_close(model.other(x), unsharded.encode(x) + 2)
    torch.testing.assert_close(copy.deepcopy(model).encode(x), unsharded.encode(x) + 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Viewing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(x.shape)


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@on_two_ranks
def test_a_view_as_output_warns_once() -> None:
    unsharded, model = pair(make=lambda: Stack(block=Viewing))
    with pytest.warns(UserWarning, match=r"layers\.0 \(Viewing\) returned a view tensor"):
        local_loss(model, 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local_loss(model, 1).backward()
    assert_same_accumulated(model, unsharded, range(2))


# --- after an error


class Failing(Block):
    fail: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.fail == "forward":
            raise KeyError("in forward")
        if self.fail == "backward":
            out.register_hook(self._raise)
        return out

    def _raise(self, grad: Tensor) -> Tensor:
        raise KeyError("in backward")


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize(("where", "index"), [("forward", 2), ("backward", 0)])
@on_two_ranks
def test_a_step_after_an_error_is_right(where: str, index: int, reset: bool) -> None:
    unsharded, model = pair(make=lambda: Stack(3, block=Failing))
    local_loss(model, 0).backward()
    model.zero_grad()
    model.layers[index].fail = where
    with pytest.raises(KeyError, match=where):
        local_loss(model, 1).backward()
    assert where == "backward" or isinstance(model.layers[index].up.weight, DTensor)
    model.layers[index].fail = None
    if reset:
        model.reset_iter_state()
    else:
        model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    local_loss(model, 2).backward()
    assert_same_accumulated(model, unsharded, range(2, 3))
    assert held_bytes(model) == 0


@on_two_ranks
def test_a_step_after_one_rank_failed_is_right() -> None:
    """In its loss, so that no rank runs backward."""
    unsharded, model = pair()
    model.reset_iter_state()  # before the first forward there is nothing to do
    loss = local_loss(model, 0)
    model.reset_iter_state()
    del loss
    local_loss(model, 1).backward()
    assert_same_accumulated(model, unsharded, range(1, 2))


@on_two_ranks
def test_a_forward_without_backward_on_one_rank_does_not_matter() -> None:
    unsharded, model = pair(reshard_after_forward=True)
    gc.disable()
    try:
        kept = local_loss(model, 0)
        if dist.get_rank() == 1:
            del kept
        local_loss(model, 1).backward()
        assert_same_accumulated(model, unsharded, range(1, 2))
        kept = None
        assert [use for use in running(unit_of(model)).iteration._uses if use() is not None] == []
    finally:
        gc.enable()


class Written(nn.Module):
    """A root that writes a tensor under a parameter's name, and reads on behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        self._parameters["scale"] = scale * 3  # type: ignore[assignment]
        for layer in self.layers:
            x = layer(x * self.scale)
        return self.head(x) * scale


@on_two_ranks
def test_a_root_may_write_under_the_name_of_what_it_reads_on() -> None:
    unsharded, model = twins(Written)
    shard(model)
    first, second = unsharded.layers
    for step in range(3):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        times = 3 * unsharded.scale
        expected = unsharded.head(second(first(batch * times) * times)) * unsharded.scale
        torch.testing.assert_close(model(batch), expected)


class Gives(nn.Module):
    """A root that reads another one of its weights each time, and may return it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512, bias=False)
        self.a, self.b = (nn.Parameter(torch.randn(512, 512) / 20) for _ in range(2))

    def forward(self, x: Tensor, gives: bool) -> Any:
        x = self.inner(x)
        return (x @ self.b, self.b) if gives else x @ self.a


@on_two_ranks
def test_a_weight_that_one_forward_returns_leaves_those_of_another() -> None:
    unsharded, model = twins(Gives)
    fully_shard(model.inner)
    fully_shard(model, reshard_after_forward=True)
    batch = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    for one in (unsharded, model):
        first = one(batch, False)
        second, _ = one(batch, True)
        (first.sum() + second.sum()).backward()
    assert_same_grads(model, unsharded, atol=1e-3, rtol=1e-4)


class Scales(nn.Module):
    """Takes a list of a tensor and whatever, which it returns as well."""

    def __init__(self, partly_frozen: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.ones(4), requires_grad=not partly_frozen)

    def forward(self, inputs: list[Any]) -> Any:
        out = inputs[0] * self.scale + self.shift
        return [out, inputs] if len(inputs) > 1 else out


@pytest.mark.parametrize("partly_frozen", [True, False])
@on_two_ranks
def test_inputs_in_a_circle_are_refused(partly_frozen: bool) -> None:
    """Where forward looks for them, it has not begun. The next one is right."""
    model = fully_shard(Scales(partly_frozen))
    circle: list[Any] = [torch.ones(4)]
    circle.append(circle)
    with pytest.raises(RuntimeError, match=r"\(root\) \(Scales\).*circular"):
        model(circle)
    if partly_frozen:
        assert isinstance(model.scale, DTensor)
        assert not running(unit_of(model)).uses and not running(unit_of(model)).iteration.depth
    model([torch.ones(4)]).sum().backward()
    torch.testing.assert_close(full(model.scale.grad), torch.ones(4))


@on_two_ranks
def test_a_profile_shows_the_units() -> None:
    _, model = pair()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        local_loss(model, 0).backward()
        let_threads_rest()
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    ranges = [event.name for event in events if event.name.startswith("FSDP::")]
    for stage in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
        for unit in ("(root) (Stack)", "layers.0 (Block)", "layers.1 (Block)"):
            assert ranges.count(f"FSDP::{stage} ({unit})") == 1
    assert ranges.index("FSDP::pre_forward (layers.0 (Block))") < ranges.index("FSDP::pre_forward (layers.1 (Block))")
    assert ranges[-1] == "FSDP::end_backward ((root) (Stack))"


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda block, x: torch.func.vmap(block)(x),
    "jvp": lambda block, x: sum(torch.func.jvp(block, (x,), (torch.ones_like(x),))),
    "grad": lambda block, x: x + torch.func.grad(lambda y: block(y).pow(2).sum())(x),
    "grad and a call": lambda block, x: block(x) + torch.func.grad(lambda y: block(y).pow(2).sum())(x),
    "none, which frees what the others left gathered": lambda block, x: block(x),
}


class Transforming(nn.Module):
    """A block in a transform of torch.func, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x: Tensor, how: str) -> Tensor:
        return self.layers[1](TRANSFORMS[how](self.layers[0], x))  # type: ignore[no-any-return]


@on_two_ranks
def test_parameters_get_their_gradients_through_transforms_of_torch_func() -> None:
    unsharded, model = twins(Transforming)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    inputs = [torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for how in ("jvp", "grad"):  # of a block by itself, before the root's first forward
        got, expected = (TRANSFORMS[how](one.layers[0], inputs[0]) for one in (model, unsharded))
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    for how in TRANSFORMS:
        model(inputs[dist.get_rank()], how).pow(2).mean().backward()
        torch.stack([unsharded(x, how).pow(2).mean() for x in inputs]).mean().backward()
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-4)
        for one in (model, unsharded):
            one.zero_grad()
    assert held_bytes(model) == 0


class Dropping(nn.Module):
    """Blocks, of which a call may leave some out, as layer drop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in left_out else layer(x)
        return x


@pytest.mark.compat
@pytest.mark.parametrize("raises", [False, True])
@on_two_ranks
def test_a_unit_that_did_not_run_is_gathered_anew(raises: bool) -> None:
    """What was gathered ahead for it is not used after a step."""
    unsharded, model = twins(Dropping)
    shard(model)
    optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, unsharded)]
    for step, left_out in enumerate(((), (1,), (), (0, 1), ())):
        batch = torch.randn(dist.get_world_size(), 2, 8, generator=torch.Generator().manual_seed(step))
        if raises:
            with pytest.raises(RuntimeError):  # the first block has launched the gather of the second
                model(batch[0][:, :3])
        model(batch[dist.get_rank()], left_out).pow(2).sum().backward()
        torch.stack([unsharded(one, left_out).pow(2).sum() for one in batch]).mean().backward()
        for one, optim in zip((model, unsharded), optims):
            optim.step()
            optim.zero_grad()
            with torch.no_grad():
                for param in one.parameters():
                    param.mul_(0.9)  # what had no gradient decays as well
        assert_same_params(model, unsharded, atol=1e-5)


# --- rows of the table of differences in docs/from-fsdp2.md, beside what FSDP2 does


@on_two_ranks
def test_between_unshard_and_reshard_reads_are_full_and_what_is_registered_are_shards() -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    outputs = []
    for package in (fsdp_compile, torch_fsdp):
        torch.manual_seed(0)
        model: Any = package.fully_shard(Block())
        with torch.no_grad():
            model(x)  # behind which ours frees the root
        assert isinstance(model.up.weight, DTensor) == (package is fsdp_compile)
        model.reshard()
        model(x).sum().backward()
        model.unshard()
        registered = dict(model.named_parameters())["up.weight"]
        assert isinstance(registered, DTensor) == (package is fsdp_compile)
        assert isinstance(model.up.weight, nn.Parameter)
        with torch.no_grad():
            before = model.up.weight.clone()
            assert type(before) is torch.Tensor and before.shape == (33, 16)
            model.up.weight.mul_(2)
            torch.testing.assert_close(model.up.weight, before * 2)
            outputs.append(model(x))
        model.reshard()
        torch.testing.assert_close(full(model.up.weight), before, atol=0, rtol=0)
        assert model.up.weight.grad is not None  # the shard's
        model.unshard()
        torch.testing.assert_close(model.up.weight, before, atol=0, rtol=0)
        model.reshard()
    torch.testing.assert_close(*outputs)
