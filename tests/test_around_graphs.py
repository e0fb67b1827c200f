"""What the eager path does around graphs of compiled blocks: what is launched when and freed, ways to compile."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_compile import configure, fully_shard, no_sync
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.eager import around, backward, forward, gathered, reduction
from tests.comparing import batches, full, loss_of, mine, reference_backward, train_and_compare
from tests.compiling import compile_blocks, num_graphs
from tests.models import Block, Stack, pair, twins
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks
from tests.recording import no_markers
from tests.test_eager import PlainReduceScatter

# --- what is launched when, and what is freed -------------------------------------------------------------------------


class Events(list[str]):
    """What happens to the units of a model, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: path or "root" for path, module in model.named_modules()}

    def note(self, what: str, unit: Unit) -> None:
        self.append(f"{what} {self._names[unit.modules[0]]}".replace("layers.", ""))

    @contextmanager
    def noted(self) -> Iterator[None]:
        launch, wait, give = gathered.Gathered._launch, gathered.Gathered._land, around._give_all
        enter, reduce, complete = backward.enter_backward, reduction.Reduction.__init__, reduction.Reduction.complete

        def on_launch(one: Any, in_flight: Any, *begun: Any) -> None:
            self.note("gather", one.unit)
            launch(one, in_flight, *begun)

        def on_wait(one: Any, in_flight: Any) -> None:
            wait(one, in_flight)
            self.note("have", one.unit)

        def on_give(call: Any) -> None:
            give(call)
            self.note("compute", call.unit)

        def on_enter(call: Any) -> None:
            enter(call)
            self.note("backward", call.unit)

        def on_reduce(one: Any, gathered: Any, *args: Any, **kwargs: Any) -> None:
            reduce(one, gathered, *args, **kwargs)
            self.note("reduce", gathered.unit)

        def on_complete(one: Any) -> None:
            self.note("wait for", one.gathered.unit)
            complete(one)

        with (
            mock.patch.object(gathered.Gathered, "_launch", on_launch),
            mock.patch.object(gathered.Gathered, "_land", on_wait),
            mock.patch.object(around, "_give_all", on_give),
            mock.patch.object(forward, "enter_backward", on_enter),
            mock.patch.object(reduction.Reduction, "__init__", on_reduce),
            mock.patch.object(reduction.Reduction, "complete", on_complete),
        ):
            yield


def _order() -> tuple[str, str]:
    model = compile_blocks(pair(make=functools.partial(Stack, 3, vocab=1 << 14))[1])
    loss_of(model(mine())).backward()
    events = Events(model)
    with events.noted():
        loss = loss_of(model(mine()))
        in_forward = ", ".join(events)
        events.clear()
        loss.backward()
    return in_forward, ", ".join(events)


def test_gathers_run_one_block_ahead_and_reductions_one_behind(two_ranks: Ranks) -> None:
    """Gathers run one block ahead, reductions one behind; of the root, the head is reduced before them."""
    for in_forward, in_backward in two_ranks.run(_order):
        assert in_forward == (
            "gather root, have root, gather 0, have 0, gather 1, compute 0, have 1, gather 2, compute 1, "
            "have 2, gather root, gather root, compute 2, have root, have root"
        )
        assert in_backward == (
            "gather 2, backward root, reduce root, "
            "have 2, gather 1, backward 2, wait for root, reduce 2, "
            "have 1, gather 0, backward 1, wait for 2, reduce 1, "
            "have 0, backward 0, wait for 1, reduce 0, "
            "wait for 0, reduce root, wait for root"
        )


def _compiled_nodes(out: Tensor) -> list[Any]:
    """The nodes of compiled graphs behind ``out``."""
    found, seen, waiting = [], set(), [out.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "saved_tensors") and "CompiledFunction" in type(node).__name__:
            found.append(node)
        waiting += [one for one, _ in node.next_functions]
    return found


def units_inside(model: nn.Module) -> list[Unit]:
    return [unit for unit in map(unit_of, model.modules()) if unit is not None and unit.outer is not None]


def saved_full_weights(model: Any, call: Callable[..., Tensor] | None = None) -> int:
    """Bytes of full weights, or of anything of their size, that are alive between forward and backward."""
    params = [param.shard for unit in units_inside(model) for param in unit.params]
    sizes = {shard.numel() for shard in params if shard.ndim == 2}
    out = (call or model)(mine())
    fulls = [full for unit in units_inside(model) for full in unit.running.gathered.fulls]
    nodes = _compiled_nodes(out)
    assert nodes
    saved = [one for node in nodes for one in node.saved_tensors if one is not None and one.numel() in sizes]
    assert saved, "backward reads weights"
    loss_of(out).backward()
    out = (call or model)(mine())
    saved = [one for node in _compiled_nodes(out) for one in node.saved_tensors if one.numel() in sizes]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in [*fulls, *saved]}
    return sum(storages.values())


class CheckpointedBlock(Block):
    """Recomputed in backward."""

    def _inner(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)


def _memory() -> list[int]:
    alive = []
    for block, reshard in ((Block, None), (CheckpointedBlock, None), (Block, False)):
        model = compile_blocks(pair(make=functools.partial(Stack, 1, block=block), reshard_after_forward=reshard)[1])
        alive.append(saved_full_weights(model))
    torch._dynamo.reset()  # or another width makes sizes dynamic
    model = compile_blocks(pair(make=functools.partial(Stack, 1, 40))[1])

    def call(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens)

    return [*alive, saved_full_weights(model, call)]


def test_no_full_weight_lives_between_forward_and_backward(two_ranks: Ranks) -> None:
    resharded, recomputed, kept, under_autocast = two_ranks.run(_memory)[0]
    assert resharded == recomputed == under_autocast == 0
    assert kept > 0


# --- ways to compile, and ways to fail --------------------------------------------------------------------------------


def _assert_first_gradients(model: nn.Module, unsharded: nn.Module) -> None:
    """Those of the first batches, whatever wrappers the parameters' names tell of."""
    reference_backward(unsharded, batches(0))
    ours = {name.replace("_orig_mod.", ""): param for name, param in model.named_parameters()}
    for name, param in unsharded.named_parameters():
        torch.testing.assert_close(full(ours[name].grad), param.grad, atol=1e-6, rtol=1e-4)


WAYS = ("compile, shard", "shard, compile", "forward", "wrap, shard", "shard, wrap", "wrap last")


@on_two_ranks
def test_however_blocks_are_compiled() -> None:
    unsharded, model = twins(functools.partial(Stack, len(WAYS)))
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    for index, way in enumerate(WAYS):
        layer = model.layers[index]
        if way == "compile, shard":
            layer.compile(**options)
        elif way == "wrap, shard":
            model.layers[index] = torch.compile(layer, **options)
        fully_shard(model.layers[index])
        if way == "shard, compile":
            layer.compile(**options)
        elif way == "shard, wrap":
            model.layers[index] = torch.compile(layer, **options)
    fully_shard(model)
    for index, way in enumerate(WAYS):
        layer = model.layers[index]
        if way == "wrap last":
            model.layers[index] = torch.compile(layer, **options)
        elif way == "forward":
            layer.forward = torch.compile(layer.forward, **options)
    with no_markers():
        loss_of(model(mine())).backward()
    _assert_first_gradients(model, unsharded)
    wrapped = [f"layers.{index}._orig_mod.norm.weight" in model.state_dict() for index in range(len(WAYS))]
    assert wrapped == ["wrap" in way for way in WAYS]
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    model.load_state_dict(model.state_dict())
    model.zero_grad()
    with no_markers():
        loss_of(model(mine())).backward()
    unsharded.zero_grad()
    _assert_first_gradients(model, unsharded)


@on_two_ranks
def test_a_model_compiled_whole_is_one_graph_whatever_its_blocks_are() -> None:
    unsharded, model = pair()
    compile_blocks(model)
    train_and_compare(torch.compile(model, backend="aot_eager", fullgraph=True), model, unsharded, steps=2)
    assert num_graphs() == 1


class Calling(Block):
    """A class with a call of its own, as models have that checkpoint there."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(2 * x)


@on_two_ranks
def test_a_wrapped_block_is_called_as_its_class_says() -> None:
    unsharded, model = twins(functools.partial(Stack, 2, block=Calling))
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")
        fully_shard(layer)
    fully_shard(model)
    loss_of(model(mine())).backward()
    _assert_first_gradients(model, unsharded)


class LooksUpAndProjects(Block):
    """A block that looks rows up in a weight and multiplies by it as well, so that backward needs the weight."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.table = nn.Parameter(torch.randn(7, dim))

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.embedding(torch.arange(x.shape[-2]) % 7, self.table)
        return super().forward(x + rows) + (x @ self.table.t()) @ self.table


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_two_ranks
def test_a_block_looks_rows_up_in_a_weight_that_it_multiplies_by_as_well(backend: str) -> None:
    unsharded, model = twins(functools.partial(Stack, 2, block=LooksUpAndProjects))
    for layer in model.layers:
        fully_shard(layer)
        layer.compile(backend=backend)
    fully_shard(model)
    loss_of(model(mine())).backward()
    _assert_first_gradients(model, unsharded)


@on_two_ranks
def test_a_copy_of_a_model_with_compiled_blocks() -> None:
    unsharded, model = twins()
    model.layers[0] = torch.compile(model.layers[0], backend="aot_eager")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    loss_of(model(mine())).backward()
    twin = copy.deepcopy(model)
    twin.layers[1].compile(backend="aot_eager")
    twin.zero_grad()
    with no_markers():
        loss_of(twin(mine())).backward()
    _assert_first_gradients(twin, unsharded)


class Raising(Block):
    raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("on purpose")
        return super().forward(x)


@on_two_ranks
def test_an_error_in_a_compiled_block_leaves_nothing_gathered() -> None:
    unsharded, model = pair(make=lambda: Stack(3, block=Raising))
    compile_blocks(model, fullgraph=False)
    loss_of(model(mine())).backward()
    model.zero_grad()
    model.layers[1].raises = True
    with pytest.raises(ValueError, match="on purpose"):
        model(mine())
    for layer in model.layers:
        assert isinstance(layer.up.weight, DTensor)
        assert layer.up._fsdp_compile_full__weight is None
        assert all(full.untyped_storage().nbytes() == 0 for full in unit_of(layer).running.gathered.fulls)
    model.layers[1].raises = False
    train_and_compare(model, model, unsharded)


@on_two_ranks
def test_gradients_that_are_asked_for_hooks_and_other_tensors_in_place_of_parameters() -> None:
    unsharded, model = pair()
    compile_blocks(model)
    params = list(model.parameters())
    grads = torch.autograd.grad(loss_of(model(mine())), params)
    reference_backward(unsharded, batches(0))
    for grad, theirs in zip(grads, unsharded.parameters()):
        torch.testing.assert_close(grad.full_tensor(), theirs.grad, atol=1e-6, rtol=1e-4)
    assert all(param.grad is None for param in params)

    # What others accumulated stays where one gradient is asked for.
    with no_sync(model):
        loss_of(model(mine())).backward()
    torch.autograd.grad(loss_of(model(mine())), [model.layers[0].up.bias])
    loss_of(model(mine())).backward()
    for param, theirs in zip(params, unsharded.parameters()):
        if param is not model.layers[0].up.bias:  # whose held gradient went to who asked
            torch.testing.assert_close(param.grad.full_tensor(), 2 * theirs.grad, atol=1e-6, rtol=1e-4)
    model.zero_grad()

    others = {name: param.detach() * 0.5 for name, param in unsharded.named_parameters()}
    out = torch.func.functional_call(model, others, (mine(),))
    torch.testing.assert_close(out, torch.func.functional_call(unsharded, others, (mine(),)))
    low = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(low, assign=True)
    unsharded.load_state_dict(others)
    unsharded.zero_grad()
    train_and_compare(model, model, unsharded, steps=2)

    seen: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen.append(name))
        param.register_hook(lambda grad: grad * 2)
    loss_of(model(mine())).backward()
    reference_backward(unsharded, batches(0))
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
    for param, theirs in zip(model.parameters(), unsharded.parameters()):
        torch.testing.assert_close(param.grad.full_tensor(), theirs.grad * 2, atol=1e-6, rtol=1e-4)


@on_two_ranks
def test_what_only_the_eager_path_can_honour_keeps_no_block_from_being_compiled() -> None:
    """And what only a graph of the whole model can heed is said, once."""
    unsharded, model = pair()
    compile_blocks(model)
    comm = PlainReduceScatter()
    for layer in model.layers:
        layer.set_custom_reduce_scatter(comm)
    _is_told_of_a_budget(model, unsharded, ".* is compiled by itself")
    assert num_graphs() == 1 and comm.num_calls > 0
    unsharded, model = pair()
    _is_told_of_a_budget(model, unsharded, ".root. .* runs eagerly")


def _is_told_of_a_budget(model: nn.Module, unsharded: nn.Module, why: str) -> None:
    configure(model, memory_budget="1GiB")
    with pytest.warns(UserWarning, match=f"memory_budget or plan has no effect where {why}") as caught:
        train_and_compare(model, model, unsharded, steps=2)
    assert sum("memory_budget" in str(one.message) for one in caught) == 1, "said once"


@on_two_ranks
def test_prefetching_is_as_the_user_says() -> None:
    model = compile_blocks(pair(make=functools.partial(Stack, 3))[1])
    first, second, third = model.layers
    first.set_modules_to_forward_prefetch([second, third])
    loss_of(model(mine())).backward()
    events = Events(model)
    with events.noted():
        model(mine())
    assert ", ".join(events[:7]) == "gather root, have root, gather 0, have 0, gather 1, gather 2, compute 0"
