"""The eager path does what FSDP2's users know: every setter of FSDPModule, against the unsharded model."""

from __future__ import annotations

import copy
import functools
import gc
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
from fsdp_compile.core.unit import unit_of, units_in
from fsdp_compile.eager.running import running
from tests.comparing import (
    assert_same_grads,
    batches,
    full,
    local_loss,
    loss_of,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import compile_blocks, compiled
from tests.models import Block, Stack, mesh_of, pair, shard, twins
from tests.ranks import Ranks
from tests.recording import GATHER, REDUCE, Collectives, Wire, let_threads_rest


def assert_same_accumulated(model: nn.Module, unsharded: nn.Module, steps: range) -> None:
    unsharded.zero_grad()
    for step in steps:
        reference_backward(unsharded, batches(step))
    assert_same_grads(model, unsharded)


# --- what a user of FSDP2 looks for


def _is_fsdp2s_class() -> None:
    import torch.distributed.fsdp as torch_fsdp

    _, model = pair()
    assert isinstance(model, FSDPModule) and isinstance(model, torch_fsdp.FSDPModule)
    assert not isinstance(model.norm, torch_fsdp.FSDPModule)
    theirs = {name for name, value in vars(torch_fsdp.FSDPModule).items() if callable(value)}
    inherited = {name for name in theirs if getattr(type(model), name) is getattr(torch_fsdp.FSDPModule, name)}
    assert not inherited - {"__doc__", "__module__"}, inherited


@pytest.mark.compat
def test_it_is_fsdp2s_class_and_inherits_no_method_of_it(two_ranks: Ranks) -> None:
    two_ranks.run(_is_fsdp2s_class)


# --- unshard, reshard


def _unshard() -> None:
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
        local_loss(model, 0).backward()
    assert [name for name, _ in seen.seen].count(GATHER) > 0
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)


def test_unshard_and_reshard_show_in_reads(two_ranks: Ranks) -> None:
    two_ranks.run(_unshard)


def _unshard_before_a_step_is_not_stale() -> None:
    unsharded, model = pair()
    optim, reference = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, unsharded))
    for step in range(3):
        for layer in model.layers:
            layer.unshard()  # and no reshard: what was gathered before the optimizer's step must not be used after it
        local_loss(model, step).backward()
        reference_backward(unsharded, batches(step))
        assert_same_grads(model, unsharded)
        model.layers[0].unshard()
        for one in (optim, reference):
            one.step()
            one.zero_grad()


def test_what_was_gathered_before_a_step_is_not_used_after_it(two_ranks: Ranks) -> None:
    two_ranks.run(_unshard_before_a_step_is_not_stale)


# --- when parameters are gathered and freed


def _gathers(reshard: bool | None) -> tuple[int, int]:
    _, model = pair(reshard_after_forward=reshard)
    local_loss(model, 0).backward()
    with Collectives() as forward:
        loss = local_loss(model, 1)
    with Collectives() as backward:
        loss.backward()
    return forward.count(GATHER), backward.count(GATHER)


def test_reshard_after_forward_decides_what_backward_gathers(two_ranks: Ranks) -> None:
    assert two_ranks.run(_gathers, False)[0][1] == 0
    forward, backward = two_ranks.run(_gathers, True)[0]
    assert forward == backward > 0
    kept_root_forward, kept_root_backward = two_ranks.run(_gathers, None)[0]
    assert kept_root_forward == forward and 0 < kept_root_backward < forward


def _reshard_after_backward() -> None:
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


def test_parameters_may_stay_gathered_between_micro_batches(two_ranks: Ranks) -> None:
    two_ranks.run(_reshard_after_backward)


def _storages(model: nn.Module) -> dict[str, int]:
    """Bytes that each unit holds gathered."""
    held = {}
    for run in map(running, units_in(model)):
        fulls = [] if run.gathered is None or run.gathered.fulls is None else run.gathered.fulls
        held[run.unit.name] = sum(tensor.untyped_storage().nbytes() for tensor in fulls if tensor is not None)
    return held


def _frozen(trainable: Callable[[str], bool]) -> None:
    unsharded, model = pair()
    for one in (unsharded, model):
        for name, param in one.named_parameters():
            param.requires_grad_(trainable(name))
    held: list[int] = []
    model.layers[0].register_full_backward_hook(lambda *unused: held.append(sum(_storages(model).values())))
    for step in range(2):
        local_loss(model, step).backward()
        reference_backward(unsharded, batches(step))
    assert_same_grads(model, unsharded)
    one_layer = sum(param.numel() for param in unsharded.layers[0].parameters()) * 4
    # At the first layer's end only it and the root, which is kept, may be there: not the layers behind it.
    root = sum(param.numel() for name, param in unsharded.named_parameters() if not name.startswith("layers")) * 4
    padding = 256
    assert max(held) <= root + one_layer + padding, (held, root, one_layer)
    assert sum(_storages(model).values()) == 0


def _everything_but_biases(name: str) -> bool:
    return name.endswith("bias")


def _only_the_embedding(name: str) -> bool:
    return name.startswith("embed")


def _only_what_comes_last(name: str) -> bool:
    return name.startswith(("head", "layers.1."))


def _a_frozen_norm_before_a_head(backend: str | None) -> None:
    """The root's frozen norm is read by backward after the gradient of its head came, and no input asks for one."""
    unsharded, model = pair()
    for one in (unsharded, model):
        for name, param in one.named_parameters():
            param.requires_grad_(_only_what_comes_last(name))
    if backend is not None:
        compile_blocks(model, backend)
    for step in range(2):
        local_loss(model, step).backward()
        reference_backward(unsharded, batches(step))
    assert_same_grads(model, unsharded)
    assert sum(_storages(model).values()) == 0


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_a_frozen_parameter_stays_until_backward_has_read_it(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(_a_frozen_norm_before_a_head, backend)


@pytest.mark.parametrize("trainable", [_everything_but_biases, _only_the_embedding])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_frozen_units_are_freed_when_backward_leaves_them(two_ranks: Ranks, trainable: Callable[[str], bool]) -> None:
    two_ranks.run(_frozen, trainable)


def _keep_storage() -> None:
    unsharded, model = pair()
    model.set_keep_unsharded_storage(True)
    local_loss(model, 0).backward()
    addresses = [full.data_ptr() for layer in model.layers for full in _fulls(layer)]
    local_loss(model, 1).backward()
    assert addresses == [full.data_ptr() for layer in model.layers for full in _fulls(layer)]
    assert_same_accumulated(model, unsharded, range(2))


def _fulls(layer: Any) -> list[Tensor]:
    gathered = running(unit_of(layer)).gathered
    assert gathered is not None and gathered.fulls is not None
    return gathered.fulls


def test_kept_storage_has_stable_addresses(two_ranks: Ranks) -> None:
    two_ranks.run(_keep_storage)


# --- the order of gathers


def _order() -> None:
    unsharded, model = pair(3, make=lambda: Stack(3))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])
    model.layers[2].set_modules_to_backward_prefetch([model.layers[0], model.layers[1]])
    for step in range(2):
        local_loss(model, step).backward()
    assert_same_accumulated(model, unsharded, range(2))


def test_explicit_prefetch_changes_the_order_and_not_the_numbers(two_ranks: Ranks) -> None:
    two_ranks.run(_order)


class Ordered(Collectives):
    """Also marks where compute begins: the first matmul after a gather."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.seen.append(("compute", 0))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _prefetch() -> list[str]:
    _, model = pair(make=lambda: Stack(num_blocks=4))
    for step in range(2):
        local_loss(model, step).backward()
    with Ordered() as seen:
        local_loss(model, 2)
    return [name for name, _ in seen.seen]


def test_the_next_units_gather_is_launched_before_this_unit_computes(two_ranks: Ranks) -> None:
    names = two_ranks.run(_prefetch)[0]
    first = names.index("compute")
    gathered_units = names[:first].count(GATHER)
    assert gathered_units == names[: first + 1].count(GATHER)
    after_first = names[first:]
    # The last unit's gathers are not behind the last compute but ahead of the one before.
    assert GATHER not in after_first[len(after_first) - after_first[::-1].index("compute") :]
    assert names[:first].count(GATHER) >= 3, names  # root, first block, and the second one ahead


# --- gradients


def _reductions(backend: str | None) -> list[Any]:
    """What backward launches, of a model whose head is so large that it travels alone."""
    unsharded, model = pair(make=lambda: Stack(2, vocab=1 << 14))
    run: Any = model if backend is None else compiled(model, backend)
    launches: list[Any] = []
    for step in range(3):  # a later one: the first steps of a graph send what the ranks compare
        model.zero_grad()
        loss = loss_of(run(mine(step)))
        with Wire() as wire:
            loss.backward()
        launches = wire.launches
    assert_same_accumulated(model, unsharded, range(2, 3))
    return launches


@pytest.mark.parametrize("backend", ["passes", pytest.param("inductor", marks=pytest.mark.more)])
def test_a_bucket_is_reduced_when_its_gradients_are_there_as_in_a_graph(two_ranks: Ranks, backend: str) -> None:
    for eagerly, in_graph in zip(two_ranks.run(_reductions, None), two_ranks.run(_reductions, backend), strict=True):
        assert eagerly == in_graph
        sizes = [sizes for name, sizes in eagerly if "all_to_all" in name]
        assert sizes[0] == sizes[3] and sizes[1] == sizes[2] and len(sizes) == 5  # head, two layers, embedding, norm


def _no_sync(reshard: bool) -> None:
    unsharded, model = pair(make=lambda: Stack(tied=True), reshard_after_forward=reshard)
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


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_accumulate_without_communication(two_ranks: Ranks, reshard: bool) -> None:
    two_ranks.run(_no_sync, reshard)


def _flag_is_read_in_backward() -> None:
    unsharded, model = pair()
    losses = [local_loss(model, step) for step in range(3)]  # three micro-batches in flight
    for step, loss in enumerate(losses):
        model.set_requires_gradient_sync(step == 2)
        loss.backward()
    assert_same_accumulated(model, unsharded, range(3))


def test_the_flag_that_holds_is_that_of_backward(two_ranks: Ranks) -> None:
    two_ranks.run(_flag_is_read_in_backward)


class Sometimes(Stack):
    """Uses its second layer in every other step."""

    step = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if index != 1 or self.step % 2 == 0:
                x = layer(x)
        return self.head(self.norm(x))


def _held_back_and_then_unused() -> None:
    unsharded, model = pair(make=Sometimes)
    for step in range(2):
        unsharded.step = model.step = step
        model.set_requires_gradient_sync(step == 1)
        local_loss(model, step).backward()
        reference_backward(unsharded, batches(step))
    assert_same_grads(model, unsharded)


def test_what_was_held_back_is_reduced_even_where_the_last_backward_does_not_come(two_ranks: Ranks) -> None:
    two_ranks.run(_held_back_and_then_unused)


def _unused() -> None:
    unsharded, model = pair(make=Sometimes)
    unsharded.step = model.step = 1
    model.set_reduce_scatter_unused_params(True)
    local_loss(model, 0).backward()
    reference_backward(unsharded, batches(0))
    for param in unsharded.layers[1].parameters():
        param.grad = torch.zeros_like(param)
    assert_same_grads(model, unsharded)


def test_unused_parameters_get_zeros_on_request(two_ranks: Ranks) -> None:
    two_ranks.run(_unused)


def _divide(factor: float, force_sum: bool) -> None:
    unsharded, model = pair()
    model.set_gradient_divide_factor(factor, recurse=True)
    model.set_force_sum_reduction_for_comms(force_sum, recurse=True)
    local_loss(model, 0).backward()
    reference_backward(unsharded, batches(0))
    for param in unsharded.parameters():
        param.grad.mul_(dist.get_world_size() / factor)
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize("force_sum", [True, False])
def test_a_divide_factor_of_ones_own(two_ranks: Ranks, force_sum: bool) -> None:
    two_ranks.run(_divide, 1.0, force_sum)
    two_ranks.run(_divide, 5.0, force_sum)


def _divide_since_forward(blocks: bool) -> None:
    """Where the number of tokens is known behind forward alone."""
    unsharded, model = pair()
    if blocks:
        compile_blocks(model)
    for step, factor in enumerate((1.0, 5.0)):
        model.zero_grad()
        unsharded.zero_grad()
        loss = local_loss(model, step)
        model.set_gradient_divide_factor(factor, recurse=True)
        loss.backward()
        reference_backward(unsharded, batches(step))
        for param in unsharded.parameters():
            param.grad.mul_(dist.get_world_size() / factor)
        assert_same_grads(model, unsharded)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_divide_factor_that_is_known_behind_forward(two_ranks: Ranks, blocks: bool) -> None:
    two_ranks.run(_divide_since_forward, blocks)


def _hooks_and_inputs() -> None:
    unsharded, model = pair()
    reference_backward(unsharded, batches(0))
    params, expected = list(model.parameters()), [param.grad for param in unsharded.parameters()]
    grads = torch.autograd.grad(local_loss(model, 0), params)
    for got, want in zip(grads, expected):
        assert isinstance(got, DTensor)
        torch.testing.assert_close(full(got), want, atol=1e-6, rtol=1e-4)
    assert all(param.grad is None for param in params)

    chosen = model.layers[1].up.weight
    local_loss(model, 0).backward(inputs=[chosen])
    torch.testing.assert_close(full(chosen.grad), unsharded.layers[1].up.weight.grad, atol=1e-6, rtol=1e-4)
    assert [name for name, param in model.named_parameters() if param.grad is not None] == ["layers.1.up.weight"]
    model.zero_grad()

    handle = chosen.register_hook(lambda grad: grad * 2)
    local_loss(model, 0).backward()
    handle.remove()
    torch.testing.assert_close(full(chosen.grad), 2 * unsharded.layers[1].up.weight.grad, atol=1e-6, rtol=1e-4)


def test_gradients_asked_for_by_autograd_and_seen_by_tensor_hooks(two_ranks: Ranks) -> None:
    two_ranks.run(_hooks_and_inputs)


def _penalty_on_shards() -> None:
    unsharded, model = pair()
    penalty = sum(param.pow(2).sum() for param in model.parameters())
    assert isinstance(penalty, DTensor)
    (local_loss(model, 0) + 0.1 * penalty.full_tensor()).backward()
    reference_backward(unsharded, batches(0))
    (0.1 * sum(param.pow(2).sum() for param in unsharded.parameters())).backward()
    assert_same_grads(model, unsharded)


def test_a_penalty_on_the_shards_adds_to_their_gradients(two_ranks: Ranks) -> None:
    two_ranks.run(_penalty_on_shards)


def _optimizer_in_backward() -> None:
    unsharded, model = pair()
    ours = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
    reference = torch.optim.SGD(unsharded.parameters(), lr=0.1)

    def step(param: nn.Parameter) -> None:
        assert isinstance(param.grad, DTensor)
        ours[param].step()
        param.grad = None

    for param in ours:
        param.register_post_accumulate_grad_hook(step)
    for index in range(3):
        local_loss(model, index).backward()
        reference_backward(unsharded, batches(index))
        reference.step()
        reference.zero_grad()
        for (name, got), want in zip(model.named_parameters(), unsharded.parameters()):
            assert got.grad is None
            torch.testing.assert_close(full(got), want, atol=1e-6, rtol=1e-4, msg=name)


def test_an_optimizer_in_backward(two_ranks: Ranks) -> None:
    two_ranks.run(_optimizer_in_backward)


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


def _custom_comms() -> None:
    unsharded, model = pair()
    gather, scatter, seen = PlainAllGather(), PlainReduceScatter(), []
    layer = model.layers[1]
    layer.set_custom_all_gather(gather)
    layer.set_custom_reduce_scatter(scatter)
    model.layers[0].set_all_reduce_hook(lambda grads: seen.append(grads.mul_(3).numel()))
    local_loss(model, 0).backward()
    reference_backward(unsharded, batches(0))
    for param in unsharded.layers[0].parameters():
        param.grad.mul_(3)
    assert_same_grads(model, unsharded)
    assert gather.num_calls and scatter.num_calls and seen


def test_collectives_and_hooks_of_ones_own(two_ranks: Ranks) -> None:
    two_ranks.run(_custom_comms)


def _separate_group() -> None:
    unsharded, model = pair()
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(3)
    train_and_compare(model, model, unsharded)
    model.set_separate_reduce_scatter_group(False)


def test_reductions_in_a_group_of_their_own(two_ranks: Ranks) -> None:
    two_ranks.run(_separate_group)


# --- many micro-batches


def _manual(async_op: bool, sync: bool) -> None:
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
        assert sum(_storages(model).values()) == 0
    assert_same_accumulated(model, unsharded, range(4))


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("async_op", [True, False])
def test_backward_is_finalized_by_hand(two_ranks: Ranks, async_op: bool, sync: bool) -> None:
    two_ranks.run(_manual, async_op, sync)


def _last_backward() -> None:
    unsharded, model = pair()
    for step in range(3):
        model.set_is_last_backward(step == 2)
        local_loss(model, step).backward()
    assert_same_accumulated(model, unsharded, range(3))


def test_reductions_may_stay_in_flight_until_the_last_backward(two_ranks: Ranks) -> None:
    two_ranks.run(_last_backward)


def _two_roots() -> None:
    unsharded, model = pair()
    other_unsharded, other = pair(seed=1)
    share_comm_ctx([model, other])
    share_comm_ctx([])
    for step in range(2):
        (local_loss(model, step) + local_loss(other, step)).backward()
    assert_same_accumulated(model, unsharded, range(2))
    assert_same_accumulated(other, other_unsharded, range(2))


def test_two_roots_share_a_context(two_ranks: Ranks) -> None:
    two_ranks.run(_two_roots)


def _replicas() -> None:
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


def test_replicas_are_summed_once_for_several_micro_batches(four_ranks: Ranks) -> None:
    four_ranks.run(_replicas)


def _few_ranks() -> None:
    unsharded, model = pair(reshard_after_forward=2)
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


def test_backward_gathers_over_few_ranks_after_an_int(four_ranks: Ranks) -> None:
    four_ranks.run(_few_ranks)


def _few_ranks_after_a_step() -> None:
    unsharded, model = pair(reshard_after_forward=2)
    local_loss(model, 0)  # leaves slices, which no backward reads
    with torch.no_grad():
        for one in (unsharded, model):
            for param in one.parameters():
                param.mul_(0.5)
    torch.testing.assert_close(model(mine(0)), unsharded(mine(0)))


def test_slices_of_before_a_step_are_not_read_after_it(four_ranks: Ranks) -> None:
    four_ranks.run(_few_ranks_after_a_step)

def _embedding() -> None:
    torch.manual_seed(0)
    unsharded = Stack()
    model = copy.deepcopy(unsharded)
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


def test_an_embedding_need_not_be_gathered_for_backward(two_ranks: Ranks) -> None:
    two_ranks.run(_embedding)


def _double_backward() -> None:
    torch.manual_seed(0)
    unsharded = Block()
    model = fully_shard(copy.deepcopy(unsharded), reshard_after_forward=True)
    x = torch.ones(3, 16) * (1 + dist.get_rank())
    for one, inputs in ((model, [x]), (unsharded, [torch.ones(3, 16), 2 * torch.ones(3, 16)])):
        for value in inputs:
            value = value.clone().requires_grad_()
            (slope,) = torch.autograd.grad(one(value).pow(2).sum(), value, create_graph=True)
            (slope.pow(2).sum() / len(inputs)).backward()
    assert_same_grads(model, unsharded, rtol=1e-3)
    assert sum(_storages(model).values()) == 0
    with pytest.raises(RuntimeError, match=r"up\.weight|up\.bias|down\.weight|down\.bias.*create_graph=True"):
        torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()), create_graph=True)


def test_double_backward_through_inputs_works_and_through_parameters_is_refused(two_ranks: Ranks) -> None:
    two_ranks.run(_double_backward)


# --- units of several modules, and other entries than forward


class Chunked(Stack):
    """Norm and head are one unit; the loss is taken in chunks."""

    def body(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body(tokens)
        return torch.cat([self.head(chunk) for chunk in x.chunk(2)])


def _list_unit() -> tuple[int, int]:
    torch.manual_seed(0)
    unsharded = Chunked()
    model = copy.deepcopy(unsharded)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard([model.norm, model.head], reshard_after_forward=True)
    fully_shard(model)
    local_loss(model, 0).backward()
    assert_same_accumulated(model, unsharded, range(1))
    model.zero_grad()
    with Collectives() as seen:
        hidden = model.norm(torch.ones(2, 3, 16))  # a part of the unit, by itself
        hidden.sum().backward()
    unsharded.zero_grad()
    unsharded.norm(torch.ones(2, 3, 16)).sum().backward()
    torch.testing.assert_close(full(model.norm.weight.grad), unsharded.norm.weight.grad)
    assert sum(_storages(model).values()) == 0
    return seen.count(GATHER), seen.count(REDUCE)


def test_a_unit_of_several_modules_in_parts(two_ranks: Ranks) -> None:
    two_ranks.run(_list_unit)


def _forward_method() -> None:
    torch.manual_seed(0)
    unsharded = Chunked()
    model = shard(copy.deepcopy(unsharded))
    register_fsdp_forward_method(model, "body")
    register_fsdp_forward_method(nn.Linear(2, 2), "forward")  # not sharded: nothing to do
    with pytest.raises(ValueError, match="nowhere"):
        register_fsdp_forward_method(model, "nowhere")
    tokens = batches(0)
    model.body(tokens[dist.get_rank()]).pow(2).mean().backward()
    torch.stack([unsharded.body(batch).pow(2).mean() for batch in tokens]).mean().backward()
    assert_same_grads(model, unsharded)
    type(unsharded).device_of = lambda self, x: x.device  # type: ignore[attr-defined]
    register_fsdp_forward_method(model, "device_of")
    unit_of(model).takes_inputs_to = torch.device("meta")  # type: ignore[union-attr]
    assert model.device_of(torch.ones(2)).type == "meta"


def test_another_method_as_forward(two_ranks: Ranks) -> None:
    two_ranks.run(_forward_method)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _method_of_its_own() -> None:
    """As ``module.encode = torch.compile(module.encode)`` puts one, or a wrapper that hands on what it has not."""
    torch.manual_seed(0)
    unsharded = Encoder()
    model: Any = copy.deepcopy(unsharded)
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


def test_a_method_that_the_module_was_given(two_ranks: Ranks) -> None:
    two_ranks.run(_method_of_its_own)


class Viewing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(x.shape)


def _view() -> None:
    unsharded, model = pair(make=lambda: Stack(block=Viewing))
    with pytest.warns(UserWarning, match=r"layers\.0 \(Viewing\) returned a view tensor"):
        local_loss(model, 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local_loss(model, 1).backward()
    assert_same_accumulated(model, unsharded, range(2))


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
def test_a_view_as_output_warns_once(two_ranks: Ranks) -> None:
    two_ranks.run(_view)


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


def _recovers(where: str, index: int, reset: bool) -> None:
    unsharded, model = pair(make=lambda: Stack(3, block=Failing))
    local_loss(model, 0).backward()
    model.zero_grad()
    model.layers[index].fail = where
    with pytest.raises(KeyError, match=where):
        local_loss(model, 1).backward()
    model.layers[index].fail = None
    if reset:
        model.reset_iter_state()
    else:
        model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    local_loss(model, 2).backward()
    assert_same_accumulated(model, unsharded, range(2, 3))
    assert sum(_storages(model).values()) == 0


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_an_error_is_right(two_ranks: Ranks, where: str, index: int, reset: bool) -> None:
    two_ranks.run(_recovers, where, index, reset)


def _one_rank_fails() -> None:
    unsharded, model = pair()
    loss = local_loss(model, 0)
    failed = torch.zeros(())
    try:
        if dist.get_rank() == 0:
            raise KeyError("the loss of this rank alone")
    except KeyError:
        failed += 1
    dist.all_reduce(failed)
    assert failed == 1 and loss.requires_grad  # and so no rank runs backward
    model.reset_iter_state()
    del loss
    local_loss(model, 1).backward()
    assert_same_accumulated(model, unsharded, range(1, 2))


def test_a_step_after_one_rank_failed_is_right(two_ranks: Ranks) -> None:
    two_ranks.run(_one_rank_fails)


def _reset_before_forward() -> None:
    _, model = pair()
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match=r"on the root, .*\(Stack\)\. layers\.1 \(Block\) is inside"):
        model.layers[1].reset_iter_state()
    with pytest.raises(RuntimeError, match=r"layers\.1 \(Block\)"):
        model.layers[1].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward()


def _forward_kept_on_one_rank() -> None:
    unsharded, model = pair(reshard_after_forward=True)
    gc.disable()
    try:
        kept = local_loss(model, 0)
        if dist.get_rank() == 1:
            del kept
        local_loss(model, 1).backward()
        assert_same_accumulated(model, unsharded, range(1, 2))
        kept = None
        assert [call for call in running(unit_of(model)).iteration._calls if call() is not None] == []
    finally:
        gc.enable()


def test_a_forward_without_backward_on_one_rank_does_not_matter(two_ranks: Ranks) -> None:
    two_ranks.run(_forward_kept_on_one_rank)


def _reset_beside_another() -> None:
    unsharded, model = pair()
    _, other = pair(seed=1)
    share_comm_ctx([model, other])
    model.set_is_last_backward(False)
    local_loss(model, 0).backward()
    other.reset_iter_state()  # the reductions of the first one go on
    model.set_is_last_backward(True)
    local_loss(model, 1).backward()
    assert_same_accumulated(model, unsharded, range(2))


def test_a_reset_leaves_the_neighbour_alone(two_ranks: Ranks) -> None:
    two_ranks.run(_reset_beside_another)


class Recorder(nn.Module):
    """Any inputs; a tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: list[Any]) -> Any:
        out = inputs[0] * self.scale
        return [out, inputs] if len(inputs) > 1 else out


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Any) -> Tensor:
        return x[0] * self.scale + self.shift


def _circle_into_a_partly_frozen_unit() -> None:
    model = fully_shard(PartlyFrozen())
    circle: list[Any] = [torch.ones(4)]
    circle.append(circle)
    with pytest.raises(RuntimeError, match="circular"):
        model(circle)
    assert isinstance(model.scale, DTensor)
    assert not running(unit_of(model)).calls and not running(unit_of(model)).iteration.depth


def test_a_forward_that_is_refused_has_not_begun(two_ranks: Ranks) -> None:
    two_ranks.run(_circle_into_a_partly_frozen_unit)


def _reads_after_a_free() -> None:
    unsharded, model = pair()
    layer, embed = model.layers[0], fully_shard(nn.Embedding(6, 4))
    expected = unsharded.layers[0].up.weight.norm()
    loss = local_loss(model, 0)
    layer.unshard()
    torch.testing.assert_close(layer.up.weight.norm(), expected)
    loss.backward()  # frees
    torch.testing.assert_close(layer.up.weight.norm(), expected)
    layer.reshard()

    embed.unshard()
    before = embed.weight.sum().item()
    with torch.no_grad():
        for param in embed.parameters():
            param.add_(1)
    embed.unshard()
    assert abs(embed.weight.sum().item() - before - 24) < 1e-3


def test_a_read_gives_what_is_gathered_now(two_ranks: Ranks) -> None:
    two_ranks.run(_reads_after_a_free)


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


def _written_under_a_name() -> None:
    unsharded, model = twins(Written)
    shard(model)
    first, second = unsharded.layers
    for step in range(3):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        times = 3 * unsharded.scale
        expected = unsharded.head(second(first(batch * times) * times)) * unsharded.scale
        torch.testing.assert_close(model(batch), expected)


def test_a_root_may_write_under_the_name_of_what_it_reads_on(two_ranks: Ranks) -> None:
    two_ranks.run(_written_under_a_name)


class Gives(nn.Module):
    """A root that reads another one of its weights each time, and may return it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512, bias=False)
        self.a, self.b = (nn.Parameter(torch.randn(512, 512) / 20) for _ in range(2))

    def forward(self, x: Tensor, gives: bool) -> Any:
        x = self.inner(x)
        return (x @ self.b, self.b) if gives else x @ self.a


def _two_forwards_in_flight() -> None:
    unsharded, model = twins(Gives)
    fully_shard(model.inner)
    fully_shard(model, reshard_after_forward=True)
    batch = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    for one in (unsharded, model):
        first = one(batch, False)
        second, _ = one(batch, True)
        (first.sum() + second.sum()).backward()
    assert_same_grads(model, unsharded, atol=1e-3, rtol=1e-4)


def test_a_weight_that_one_forward_returns_leaves_those_of_another(two_ranks: Ranks) -> None:
    two_ranks.run(_two_forwards_in_flight)


def _circles() -> None:
    model = fully_shard(Recorder())
    circle: list[Any] = [torch.ones(4)]
    circle.append(circle)
    with pytest.raises(RuntimeError, match=r"\(root\) \(Recorder\).*circular"):
        model(circle)
    model([torch.ones(4)]).sum().backward()
    torch.testing.assert_close(full(model.scale.grad), torch.ones(4))


def test_inputs_in_a_circle_are_refused(two_ranks: Ranks) -> None:
    two_ranks.run(_circles)


def test_reset_and_finalization_are_the_roots(two_ranks: Ranks) -> None:
    two_ranks.run(_reset_before_forward)


def _ranges() -> list[str]:
    _, model = pair()
    tokens = batches(0)[dist.get_rank()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model(tokens)).backward()
        let_threads_rest()
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("FSDP::")]


def test_a_profile_shows_the_units(two_ranks: Ranks) -> None:
    for ranges in two_ranks.run(_ranges):
        for stage in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
            for unit in ("(root) (Stack)", "layers.0 (Block)", "layers.1 (Block)"):
                assert ranges.count(f"FSDP::{stage} ({unit})") == 1
        assert ranges.index("FSDP::pre_forward (layers.0 (Block))") < ranges.index("FSDP::pre_forward (layers.1 (Block))")
        assert ranges[-1] == "FSDP::end_backward ((root) (Stack))"


def _transforms() -> None:
    unsharded, model = pair()
    x = torch.randn(2, 5, 16)
    tangent = torch.randn(2, 5, 16)
    ours, theirs = model.layers[0], unsharded.layers[0]
    for transform in (lambda block: torch.func.jvp(block, (x,), (tangent,)), lambda block: (torch.func.grad(lambda y: block(y).sum())(x),)):
        for got, expected in zip(transform(ours), transform(theirs)):
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    tokens = batches(0)
    loss_of(model(tokens[dist.get_rank()])).backward()
    reference_backward(unsharded, tokens)
    assert_same_grads(model, unsharded)


def test_derivatives_by_inputs_through_torch_func(two_ranks: Ranks) -> None:
    two_ranks.run(_transforms)
