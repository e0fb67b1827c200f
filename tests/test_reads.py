"""Parameters that modules read in unusual ways: they work, or they raise with the parameter's name."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.eager import forward as eager
from tests.comparing import assert_same_grads, compare_one_step, full
from tests.compiling import compiled, num_graphs
from tests.models import Fault, one_unit, twins
from tests.on_ranks import on_two_ranks
from tests.ranks import Ranks

PACKAGE = Path(fsdp_compile.__file__).resolve().parent


class Recurrent(nn.Module):
    """nn.LSTM keeps its weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 7)), nn.ReLU(), nn.Linear(7, 3))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def old_weight_norm() -> nn.Module:
    """A hook of an inner module reads it."""
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 7)), nn.ReLU(), nn.Linear(7, 3))


class AsParameters(nn.Module):
    """What it reads is an ``nn.Parameter``, which code asks in one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.second.kept = self.second.weight
        is_one = isinstance(self.first.weight, nn.Parameter)
        return (x @ self.get_parameter("first.weight").t() * (2 if is_one else 1)) @ self.second.kept.t()


class TakenWithoutGrad(AsParameters):
    """It computes with a weight that it took under ``no_grad``, as code does that quantizes weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.first.weight
            scale = weight.abs().mean()
            bias = dict(self.second.named_parameters())["bias"]
        return functional.linear(functional.linear(x, weight / scale), self.second.weight, bias)


class TargetWithoutGrad(AsParameters):
    """Its first read of a weight is without grad, and the second one has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.first(x)
        return self.second(self.first(x * 2) - target)  # type: ignore[no-any-return]


class TakenInInference(AsParameters):
    """Its first read of a weight is in inference mode and has no gradient; the second read has one."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.second.weight.abs().max()
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Mapped(AsParameters):
    """It reads a weight inside of a transform first."""

    def forward(self, x: Tensor) -> Tensor:
        each = torch.func.vmap(lambda row: torch.tanh(row @ self.first.weight.t()))
        return self.second(each(x) + torch.func.vmap(self.first)(x))  # type: ignore[no-any-return]


class Again(torch.autograd.Function):
    """The checkpointing function of guided-diffusion: backward runs forward again, and differentiates by its arguments."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *params: Tensor) -> Tensor:
        ctx.run, ctx.x, ctx.params = run, x, params
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(output, [x, *ctx.params], grad, allow_unused=True)


class ComputedAgain(AsParameters):
    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]

        return Again.apply(run, x, *self.parameters())  # type: ignore[no-any-return]


class WeighsLosses(AsParameters):
    """As VQGAN does, which weighs a loss by the gradient of its last layer; and a loop over what it finds."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        output = self.second(hidden)
        of_all = torch.autograd.grad(output.sum(), list(self.parameters()), retain_graph=True, allow_unused=True)
        (of_last,) = torch.autograd.grad(output.pow(2).sum(), self.second.weight, retain_graph=True)
        weight = of_last.norm() / sum(one.norm() for one in of_all if one is not None)
        return output * weight.detach()  # type: ignore[no-any-return]


class TakesOtherData(AsParameters):
    """Its write gives the same result each time, since the write stays in an unsharded module, and not in a sharded one."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data.clamp(-0.1, 0.1)
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def _compare(make: Callable[[], nn.Module], backend: str | None) -> None:
    torch.manual_seed(0)
    unsharded = make()
    torch.manual_seed(0)
    sharded = fully_shard(make())
    run = compiled(sharded, backend, fullgraph=False)
    for step in range(2):
        x = torch.randn(dist.get_world_size(), 4, 5, 6, generator=torch.Generator().manual_seed(step))
        run(x[dist.get_rank()]).pow(2).mean().backward()
        torch.stack([unsharded(part).pow(2).mean() for part in x]).mean().backward()
        assert_same_grads(sharded, unsharded)
    assert all(isinstance(param, DTensor) for param in sharded.parameters())


READERS = (
    Recurrent, normed, old_weight_norm,
    AsParameters, TakenWithoutGrad, TargetWithoutGrad, TakenInInference, Mapped,
    ComputedAgain, WeighsLosses, TakesOtherData,
)  # fmt: skip


# Compiled, the first one is in test_what_an_eager_read_runs_is_not_compiled.
@pytest.mark.compat
@pytest.mark.parametrize(
    ("make", "backend"), [*((make, None) for make in READERS), *((make, "aot_eager") for make in READERS[1:])]
)
def test_reads_through_lists_and_parametrizations(two_ranks: Ranks, make: Any, backend: str | None) -> None:
    """What a forward was given is one tensor: in lists, through hooks and parametrizations, across graph breaks."""
    two_ranks.run(_compare, make, backend)


class Teacher(nn.Module):
    """It computes with its own weight, and with another one in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.others: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        for other in ({}, *self.others, {}):
            x = torch.tanh(torch.func.functional_call(self.inner, other, (x,)))
        return x


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_another_shard_in_the_place_of_a_parameter(backend: str | None) -> None:
    unsharded, sharded = one_unit(Teacher)
    for model in (unsharded, sharded):
        model.others = [{"weight": model.inner.weight.detach() * times} for times in (2, -3)]
    compare_one_step(unsharded, sharded, torch.ones(2, 6), backend)


class ClampsTied(nn.Module):
    """Its two layers are one unit and share a weight. The first layer writes to the weight, the second reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.first.register_forward_pre_hook(self._clamp)

    @staticmethod
    @torch.no_grad()
    def _clamp(module: Any, args: Any) -> None:
        module.weight.clamp_(-0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_a_write_in_one_module_of_a_unit_is_read_in_another(backend: str | None) -> None:
    unsharded, sharded = twins(ClampsTied)
    fully_shard([sharded.first, sharded.second], reshard_after_forward=False)  # or backward gathers what is not clamped
    fully_shard(sharded)
    compare_one_step(unsharded, sharded, torch.ones(2, 6), backend)


class Assigns(nn.Module):
    """Registers what it reads: in the place of another parameter, or in a list that it makes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "a slice of a list":
            return x * sum(self.parts[1:])
        self.second.weight = self.first.weight
        return self.second(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_what_is_read_is_registered_in_another_place(backend: str | None) -> None:
    def trained(model: nn.Module, run: Any) -> Any:
        run(torch.ones(2, 6)).pow(2).sum().backward()
        return [param if param is None else full(param) for param in (model.first.weight.grad, model.second.bias.grad)]

    model = fully_shard(Assigns("a place"))
    unsharded = Assigns("a place")
    unsharded.load_state_dict({name: full(param) for name, param in model.state_dict().items()})
    expected = trained(unsharded, unsharded)
    for _ in range(2):
        model.zero_grad()
        torch.testing.assert_close(trained(model, compiled(model, backend, fullgraph=False)), expected)
        assert isinstance(model.second.weight, DTensor) and model.second.weight is not model.first.weight
    listed = fully_shard(Assigns("a slice of a list"))
    with pytest.raises(ValueError, match="non-leaf"):  # no new parameter, which would get the gradient
        compiled(listed, backend, fullgraph=False)(torch.ones(2, 6))


@pytest.mark.compat  # before 2.15, Dynamo looks at these frames
@on_two_ranks
def test_what_an_eager_read_runs_is_not_compiled() -> None:
    """nn.LSTM runs in Python inside a compiled frame; guards on what other threads write failed now and then."""
    files: list[str] = []
    with torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: files.append(code.co_filename)):
        _compare(Recurrent, "aot_eager")
    ours = [(PACKAGE / part).resolve() for part in ("eager", "lookout", "passes")]
    assert [file for file in files if any(Path(file).resolve().is_relative_to(part) for part in ours)] == []


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_a_parameter_that_was_deleted_after_sharding(backend: str | None) -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    fully_shard(model)
    run = compiled(model, backend)
    model[0].bias = None
    run(torch.randn(4, 6)).sum().backward()
    assert model[0].weight.grad is not None
    del model[0].weight
    assert not hasattr(model[0], "weight")
    with pytest.raises(AttributeError, match="weight"):
        _ = model[0].weight


class AroundTheAttribute(nn.Module):
    """Reads a registered parameter without its attribute, and writes there, as transformers' parallel layers do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "_parameters":
            return x @ self.inner._parameters["weight"]
        if self.how == "a copy of it":
            return x @ dict(self.inner._parameters)["weight"]
        if self.how == "parameters()":
            return x @ next(self.parameters())
        found = dict(self.inner.named_parameters())
        if self.how == "functional_call":
            return torch.func.functional_call(self.inner, {name: param * 2 for name, param in found.items()}, (x,))
        if self.how == "another's":
            self.inner._parameters.update(self.other._parameters)
        else:
            self.inner._parameters.update({name: param * 2 for name, param in found.items()})
        try:
            return self.inner(x)
        finally:
            self.inner._parameters.update(found)


def _around(how: str, backend: str | None) -> None:
    unsharded, sharded = one_unit(lambda: AroundTheAttribute(how))
    shard = dict.get(sharded.inner._parameters, "weight")
    run = compiled(sharded, backend)
    for _ in range(2):
        outputs = [call(torch.ones(2, 6)) for call in (run, unsharded)]
        torch.testing.assert_close(*outputs)
        sum(output.pow(2).sum() for output in outputs).backward()  # type: ignore[union-attr]
        assert sharded.inner._parameters["weight"] is shard is next(sharded.parameters())
    assert_same_grads(sharded, unsharded)


@pytest.mark.compat
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_what_is_registered_is_full_in_forward(two_ranks: Ranks, backend: str | None) -> None:
    for how in ("_parameters", "a copy of it", "parameters()", "written", "another's", "functional_call"):
        two_ranks.run(_around, how, backend)


def _summed_and_bounded(param: Any) -> None:
    dist.all_reduce(param.grad)
    param.grad.mul_(0.5).clamp_(-5, 40)  # of a sum that is not the sum of parts


class HooksInForward(nn.Module):
    """Registers a post-accumulate hook on what it finds, once for each object, as transformers' replicated norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.hooked: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for name, param in self.inner.named_parameters():
            if torch.is_grad_enabled() and self.hooked.get(name) is not param:
                param.register_post_accumulate_grad_hook(_summed_and_bounded)
                self.hooked[name] = param
        return self.inner(torch.tanh(self.inner(x)))


@pytest.mark.compat
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_post_accumulate_hooks_that_a_forward_registers(backend: str | None) -> None:
    """They change the full gradient, of all reads."""
    unsharded, sharded = twins(lambda: nn.Sequential(HooksInForward()))
    for block in (*sharded, sharded):
        fully_shard(block)
    run = compiled(sharded, backend)
    for step in range(3):
        for model, call in ((sharded, run), (unsharded, unsharded)):
            model.zero_grad()
            call(torch.full((2, 6), step + 1.0)).pow(2).sum().backward()
        assert_same_grads(sharded, unsharded)
        with torch.no_grad():
            torch.testing.assert_close(run(torch.ones(2, 6)), unsharded(torch.ones(2, 6)))
    assert isinstance(sharded[0].inner._parameters["weight"], DTensor)


def _tripled(param: Any) -> None:
    param.grad.mul_(3)


class HooksADTensor(nn.Linear):
    """As transformers' layers do that sum gradients over a tensor parallel group, in a forward that breaks."""

    def forward(self, x: Tensor) -> Tensor:
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(_tripled)
        torch._dynamo.graph_break()
        weight, bias = (one.to_local() if isinstance(one, DTensor) else one for one in (self.weight, self.bias))
        return functional.linear(x, weight, bias)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_a_hook_on_a_dtensor_in_a_forward_that_breaks(backend: str | None) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    unsharded, sharded = twins(lambda: HooksADTensor(6, 6))
    for name, param in unsharded.named_parameters():
        setattr(sharded, name, nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Replicate()])))
    fully_shard(sharded, mesh=mesh["dp"])
    compare_one_step(unsharded, sharded, torch.ones(2, 6), backend, fullgraph=False)


class Same(nn.Module):
    """What a parameter is read as is one tensor: under two names, after a write or hook, in what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        if self.head.weight is not self.embed.weight or self.weight is not self.weight:
            hidden = hidden * 0
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        self.weight.register_hook(lambda grad: grad * 3)
        hidden = hidden @ self.weight
        hidden = checkpoint(lambda x: (x @ self.weight).sin(), hidden, use_reentrant=False)
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.skipif(find_spec("torch._higher_order_ops.register_hook") is None, reason="torch 2.11 has no op for hooks")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_all_reads_of_a_forward_give_one_tensor(backend: str | None) -> None:
    unsharded, sharded = one_unit(Same)
    compare_one_step(unsharded, sharded, torch.arange(8), backend)


class Cached(nn.Linear):
    """Keeps a parameter where nothing of ours finds it."""

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = self.cached
        return x @ weight


@on_two_ranks
def test_a_shard_that_a_forward_kept_is_named() -> None:
    model: Any = fully_shard(Cached(6, 6))
    model.cached = [model.weight]
    with pytest.raises(RuntimeError, match=r"weight was read as a shard inside a forward.*attribute"):
        model(torch.randn(2, 6))


@on_two_ranks
def test_reentrant_checkpointing_inside_a_unit() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.b, torch.relu(self.a(x)), use_reentrant=True)
            return self.c(hidden) + checkpoint(self.a, x, use_reentrant=True)

    unsharded, sharded = one_unit(Inner, reshard_after_forward=True)
    compare_one_step(unsharded, sharded, torch.ones(3, 6, requires_grad=True), None)


class Adapted(nn.Module):
    """A frozen matrix and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(("block", "calls"), [(Adapted, 1), (functools.partial(nn.Linear, 6, 6), 2), (Adapted, 2)])
@on_two_ranks
def test_reentrant_checkpointing_around_units(block: Callable[[], nn.Module], calls: int) -> None:
    """Of frozen matrices that backward reads last; of one unit that is read again after a gradient of it came."""
    unsharded, sharded = one_unit(block, reshard_after_forward=True)
    inputs = []
    for model in (sharded, unsharded):
        for _ in range(2):
            inputs.append(torch.ones(3, 6, requires_grad=True))

            def repeated(x: Tensor, model: nn.Module = model) -> Tensor:
                return model(x) if calls == 1 else model(model(x))

            checkpoint(repeated, inputs[-1], use_reentrant=True).pow(2).sum().backward()
    assert_same_grads(sharded, unsharded)
    torch.testing.assert_close(inputs[0].grad, inputs[2].grad)


class Renaming(nn.Linear):
    """Puts a parameter of a kind of its own in its weight's place when it first runs, as bitsandbytes' layers do."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "kind"):
            self.weight = nn.Parameter(self.weight.data, requires_grad=False)
            self.weight.kind = "another"  # type: ignore[attr-defined]
        return functional.linear(x, self.weight, self.bias)


@on_two_ranks
def test_a_module_that_replaces_what_it_was_given_has_its_shard_again() -> None:
    unsharded, sharded = twins(lambda: nn.Sequential(Renaming(6, 6), nn.Linear(6, 6)))
    for model in (unsharded, sharded):
        model[0].weight.requires_grad_(False)
    fully_shard(sharded[0])
    fully_shard(sharded)
    for _ in range(3):
        x = torch.ones(3, 6, requires_grad=True)
        for model in (sharded, unsharded):
            model(x).pow(2).sum().backward()
        assert isinstance(sharded[0]._parameters["weight"], DTensor)
    assert_same_grads(sharded, unsharded)

    # The module that replaces a tied weight is the second one that has it.
    unsharded = nn.Sequential(nn.Linear(6, 6), Renaming(6, 6))
    unsharded[1].weight = unsharded[0].weight
    unsharded[0].weight.requires_grad_(False)
    sharded = fully_shard(copy.deepcopy(unsharded))
    for _ in range(3):
        for model in (sharded, unsharded):
            model(torch.ones(3, 6)).pow(2).sum().backward()
        assert sharded[1]._parameters["weight"] is sharded[0]._parameters["weight"]
    for ours, theirs in zip(sharded, unsharded):  # the unsharded weights are tied no more
        torch.testing.assert_close(full(ours.bias.grad), theirs.bias.grad)


@dataclass
class Scale:
    """How a weight is quantized, as bitsandbytes' QuantState says it."""

    factor: Tensor
    kind: str = "scaled"


class Quantized(nn.Linear):
    """Reads of its weight how it is quantized, and keeps that for a weight that lost it."""

    def __init__(self, trains: bool) -> None:
        super().__init__(6, 6, bias=False)
        self.scale = Scale(torch.rand(6))
        self.weight.requires_grad_(trains)
        self.weight.scale = self.scale

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.weight, "scale", None) is None:
            self.weight = nn.Parameter(self.weight.data, requires_grad=False)
            self.weight.scale = self.scale
        assert self.weight.scale.kind == "scaled"
        return functional.linear(x, self.weight * self.weight.scale.factor)


@pytest.mark.parametrize("how", ["eagerly", "blocks", "whole"])
@on_two_ranks
def test_what_is_read_has_the_attributes_of_the_users_parameter(how: str) -> None:
    unsharded, sharded = twins(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), Quantized(trains)) for trains in (False, True)))
    )
    for block, original in zip(sharded, unsharded):  # a copy of a parameter has no attributes of the user's
        block[1].weight.scale = original[1].scale
        if how == "blocks":
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block)
    fully_shard(sharded)
    run = torch.compile(sharded, backend="aot_eager", fullgraph=True) if how == "whole" else sharded
    for step in range(2):
        for model in (run, unsharded):
            model(torch.full((3, 6), step + 1.0)).pow(2).sum().backward()
        assert_same_grads(sharded, unsharded)
        for block in sharded:
            assert isinstance(block[1]._parameters["weight"], DTensor)
            assert not hasattr(block[1]._parameters["weight"], "scale")  # or it would be saved beside the shard


@pytest.mark.parametrize("reshard", [True, False])
@on_two_ranks
def test_no_gathered_parameter_outlives_its_step(reshard: bool) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), reshard_after_forward=reshard)
    for backward in (True, False):
        refs = []
        for _ in range(3):
            begin = eager.begin_forward

            def watch(*args: Any) -> Any:
                begun = begin(*args)  # noqa: B023
                refs.append(weakref.ref(begun[0]))  # noqa: B023
                return begun

            with mock.patch.object(eager, "begin_forward", watch):
                loss = model(torch.ones(2, 6)).sum()
            if backward:
                loss.backward()
            del loss
        gc.collect()
        assert [ref for ref in refs[:-1] if ref() is not None] == []


@on_two_ranks
def test_a_backward_that_raised_leaves_no_stale_weight() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.fail = True

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Fault.apply(self.a(x), self.fail))

    unsharded, sharded = one_unit(Inner, reshard_after_forward=True)
    x = torch.ones(3, 6, requires_grad=True)
    with pytest.raises(ArithmeticError):
        checkpoint(sharded, x, use_reentrant=True).sum().backward()
    for model in (sharded, unsharded):
        model.zero_grad()
        model.fail = False
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        checkpoint(model, x, use_reentrant=True).pow(2).sum().backward()
    assert_same_grads(sharded, unsharded, rtol=1e-3)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_a_parent_reads_a_childs_weight(backend: str | None) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(6, 6)
            self.shared = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.block(x)) @ self.block.weight

    unsharded, sharded = twins(Root)
    fully_shard(sharded.block)
    fully_shard(sharded)
    for call in (compiled(sharded, backend, fullgraph=False), unsharded):
        call(torch.ones(3, 6)).pow(2).sum().backward()
    assert_same_grads(sharded, unsharded, rtol=1e-3)


@on_two_ranks
def test_dtypes_follow_to_and_load_state_dict() -> None:
    bf16 = torch.bfloat16
    model = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).to(bf16))
    model[1].float()
    assert model[1].weight.dtype is torch.float32
    model = fully_shard(nn.Sequential(nn.Linear(6, 6)))
    model.load_state_dict({fqn: value.to(bf16) for fqn, value in model.state_dict().items()}, assign=True)
    for run in (model, torch.compile(model, backend="aot_eager")):
        assert run(torch.ones(2, 6, dtype=bf16)).dtype is bf16


@on_two_ranks
def test_a_policy_holds_for_blocks_compiled_before_sharding() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for before in (True, False):
        layer = nn.Linear(6, 6)
        if before:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, mp_policy=policy)
        if not before:
            layer.compile(backend="aot_eager", fullgraph=True)
        out = layer(torch.ones(2, 6))
        assert out.dtype is torch.float32
        out.sum().backward()
        assert num_graphs() == 1  # the second layer finds the first one's


@on_two_ranks
def test_reparametrizing_after_sharding_is_refused_by_name() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(6, 6)))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Halved())
    with pytest.raises(RuntimeError, match=r"0\.weight.*before fully_shard"):
        model.to(torch.float32)
    other = fully_shard(nn.Sequential(nn.Linear(6, 6)))
    with pytest.raises(RuntimeError, match=r"0\.weight.*before fully_shard"), pytest.warns(FutureWarning):
        nn.utils.weight_norm(other[0])
