"""All-gather extensions in every way of training. What one is given lies where it lay the first time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compile import fully_shard
from tests.comparing import assert_same_grads, batches, loss_of, mean_over_ranks, reference_backward
from tests.compiling import compiled, num_graphs
from tests.models import Checkpointed, Stack, shard
from tests.on_ranks import on_three_ranks, on_two_ranks
from tests.ranks import Ranks
from tests.test_extension import Halved

_KEEPS = ("detach", "clone", "slice", "view", "as_strided", "new_zeros", "empty_like", "_to_copy", "split")


class Plain(Halved):
    """A weight that is sent as it is, and read as it arrives: no copy is ever made."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner_args, inner_kwargs = pytree.tree_map_only(Plain, lambda one: one.inner, (args, kwargs or {}))
        out = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            return args[0]
        keeps = func.overloadpacket.__name__ in _KEEPS
        return pytree.tree_map_only(Tensor, cls, out) if keeps else out

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            assert gathered.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() != 0
            return None
        return gathered, (gathered,)


class Copied(Plain):
    """Makes another tensor of what arrives, and copies into it the next time, counted by autograd or not."""

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        value = outputs[0] * 1.0
        if out is not None:
            out.copy_(value)
            return None
        return value, (value,)


class Released(Copied):
    """The same; what arrived is of no use any more."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


def _second(param: nn.Parameter) -> Shard | None:
    return Shard(1) if isinstance(param, Plain) and param.shape[1] % 2 == 0 else None


_SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "regathered": lambda: {"reshard_after_forward": True},
    "kept": lambda: {"reshard_after_forward": False},
    "shards of the second dimension": lambda: {"shard_placement_fn": _second},
    "a lone shard": lambda: {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))},
}


def _train(subclass: type[Plain], kind: str, backend: str | None = None, dim: int = 16) -> None:
    torch.manual_seed(0)
    make = Checkpointed if "checkpointed" in kind else Stack
    reference = make(2 if backend is None else 1, dim=dim, tied="tied" in kind)
    model = copy.deepcopy(reference)
    if "tied" in kind:
        model.head.weight = model.embed.weight = nn.Parameter(subclass(model.embed.weight.detach()))
    for layer in model.layers:
        for linear in (layer.up, layer.down):
            linear.weight = nn.Parameter(subclass(linear.weight.detach()))
    for one in (model, reference):
        if kind == "frozen":
            for layer in one.layers:
                layer.down.weight.requires_grad_(False)
    run = compiled(shard(model, **_SETTINGS.get(kind, dict)()), backend)
    optims = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in (model, reference)]
    for step in range(4):
        last = "held back" not in kind or step % 2 == 1
        model.set_requires_gradient_sync(last)
        inputs = batches(step)
        loss = loss_of(run(inputs[dist.get_rank()]))
        loss.backward()
        expected = reference_backward(reference, inputs)
        torch.testing.assert_close(mean_over_ranks(loss), expected, atol=1e-6, rtol=1e-5)
        if not last:
            assert all(param.grad is None for param in model.parameters())
            continue
        assert_same_grads(model, reference)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        if kind == "frozen" and step == 1:  # and thawed, and frozen elsewhere
            for one in (model, reference):
                one.layers[0].down.weight.requires_grad_(True)
                one.layers[0].up.weight.requires_grad_(False)


EAGER = [
    *((Plain, kind) for kind in (*_SETTINGS, "held back, checkpointed, tied", "frozen")),
    *((subclass, kind) for subclass in (Copied, Released) for kind in ("regathered", "kept")),
]


@pytest.mark.parametrize(("subclass", "kind"), EAGER)
@on_two_ranks
def test_trains_like_the_unsharded_model(subclass: type[Plain], kind: str) -> None:
    """A region that backward computes again reads the same storages. If one rank holds a whole shard, it is not freed."""
    _train(subclass, kind)


@pytest.mark.parametrize("kind", ["held back, checkpointed, tied", "frozen"])
@on_two_ranks
def test_trains_in_a_graph_like_the_unsharded_model(kind: str) -> None:
    _train(Plain, kind, "aot_eager")


@on_three_ranks
def test_a_short_or_empty_shard_changes_nothing() -> None:
    for dim in (16, 4):
        _train(Plain, "plain", dim=dim)


class Scaled(Plain):
    """Sent with a factor that the shard holds, and its user sets between steps: as float8's scale of torchao.

    Its halves are as careless as torchao's: one looks at the data of the factor, the other forgets it.
    """

    factor: Tensor | None = None

    def __tensor_flatten__(self) -> tuple[list[str], type]:
        return ["inner", "factor"] if self.factor else ["inner"], type(self)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        factor = torch.ones(()) if self.factor is None else self.factor
        return (self.inner * factor,), None


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_what_a_shard_holds_beside_its_weight_is_that_of_the_step(backend: str | None) -> None:
    layer = nn.Linear(8, 8, bias=False)
    weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(Scaled(layer.weight.detach()))
    fully_shard(layer, reshard_after_forward=True)
    run = compiled(layer, backend)
    x = torch.randn(3, 8)
    for factor in (None, 2.0, 3.0, None, 4.0):
        layer.weight._local_tensor.factor = None if factor is None else torch.tensor(factor)
        given = x.clone().requires_grad_()
        out = run(given)
        torch.testing.assert_close(out, x @ weight.T * (factor or 1.0))
        out.sum().backward()
        torch.testing.assert_close(given.grad, weight.sum(0).expand(3, 8) * (factor or 1.0))
        torch.testing.assert_close(layer.weight.grad.full_tensor(), x.sum(0).expand(8, 8))
        layer.weight.grad = None
    assert num_graphs() == (0 if backend is None else 2)


class _Watched(Plain):
    """Keeps what it is given, and says what to do with it."""

    given: list[Tensor] = []  # noqa: RUF012

    def fsdp_post_all_gather(self, outputs: tuple[Tensor, ...], *rest: Any, out: Tensor | None = None) -> Any:
        self.given.append(outputs[0])
        value = outputs[0].clone()
        if out is not None:
            out.data.copy_(value)
            return None
        return value, (value,)


class _WatchedAndReleased(_Watched):
    given: list[Tensor] = []  # noqa: RUF012

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


def _held(fn: Callable[..., Any], subclass: type[_Watched]) -> list[int]:
    """Bytes of what was gathered: once it is used, after forward, in backward, and after it."""
    subclass.given.clear()
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(subclass(layer.weight.detach()))
    root = nn.Sequential(fn(layer, reshard_after_forward=True), nn.Linear(8, 8))
    fn(root)
    held = []

    def note(*_: Any) -> None:
        held.append(sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in subclass.given}.values()))

    forward = layer.forward
    layer.forward = lambda x: (note(), forward(x))[1]
    out = root(torch.ones(2, 8, requires_grad=True))
    note()
    out.sum().backward()
    note()
    return [held[0], held[1], held[-1]]


@on_two_ranks
def test_what_arrived_is_held_as_long_as_the_extension_says() -> None:
    for subclass, while_used in ((_Watched, 8 * 8 * 4), (_WatchedAndReleased, 0)):
        assert _held(fully_shard, subclass) == [while_used, 0, 0]
        if while_used or torch.__version__ >= (2, 15):  # FSDP2 did not ask before
            assert _held(fsdp2, subclass) == [while_used, 0, 0]


@on_two_ranks
def test_a_weight_that_a_module_returns_stays() -> None:
    class Leaky(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.weight

    layer = Leaky(8, 8)
    expected = layer.weight.detach().clone()
    layer.weight = nn.Parameter(Plain(layer.weight.detach()))
    fully_shard(layer, reshard_after_forward=True)
    for factor in (1.0, 2.0):
        _, weight = layer(torch.ones(2, 8))
        with torch.no_grad():
            layer.weight.mul_(2.0)
        torch.testing.assert_close(weight.detach(), expected * factor)


class _Moody(Plain):
    """Raises where and when it is told to."""

    raises_in: str | None = None

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        if _Moody.raises_in == "pre":
            raise LookupError("not now")
        return super().fsdp_pre_all_gather(mesh)

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        if _Moody.raises_in == "post":
            raise LookupError("not now")
        return super().fsdp_post_all_gather(*args, **kwargs)


@pytest.mark.parametrize("step", [0, 2])
@on_two_ranks
def test_after_an_extension_that_raised_the_next_step_is_right(step: int) -> None:
    """In the first step, or the second, in the second extension of a block; the steps after it are right."""
    reference = Stack()
    model = copy.deepcopy(reference)
    for index, layer in enumerate(model.layers):
        layer.up.weight = nn.Parameter(Plain(layer.up.weight.detach()))
        layer.down.weight = nn.Parameter((_Moody if index == 1 else Plain)(layer.down.weight.detach()))
    shard(model)
    optims = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (model, reference)]
    moments = [None] * step + ["pre", "post", None, None]
    for number, _Moody.raises_in in enumerate(moments):
        inputs = batches(number)
        if _Moody.raises_in is not None:
            for _ in range(2):
                with pytest.raises(LookupError, match="not now"):
                    model(inputs[dist.get_rank()])
            with torch.no_grad(), pytest.raises(LookupError, match="not now"):
                model.layers[1](torch.ones(2, 16))
            continue
        loss_of(model(inputs[dist.get_rank()])).backward()
        reference_backward(reference, inputs)
        assert_same_grads(model, reference)
        for optim in optims:
            optim.step()
            optim.zero_grad()


def _send_itself(self: TwoTensor, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    return (self,), None


def _read_what_arrived(self: TwoTensor, outputs: tuple[Tensor, ...], *rest: Any, out: Tensor | None = None) -> Any:
    return None if out is not None else (outputs[0], outputs)


def _send_parts(self: TwoTensor, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
    return (self.a, self.b), None


def _wrap_copies(self: TwoTensor, outputs: tuple[Tensor, ...], *rest: Any, out: Tensor | None = None) -> Any:
    made = TwoTensor(*(one.clone() for one in outputs)) if out is None else out
    for part, arrived in zip((made.a, made.b), outputs):
        part.copy_(arrived)
    return None if out is not None else (made, (made,))


class _Sequential(nn.Sequential):
    """Keeps the weight that its first layer reads."""

    read: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.read = self[0].weight
        return super().forward(x)


def _wrappers_inside(before: Any, after: Any) -> list[int]:
    """Bytes that a read weight has after forward. Hooks are bound to local tensors, which is one way to bring them."""
    reference = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model, rank, ranks = _Sequential(*copy.deepcopy(reference)), dist.get_rank(), range(dist.get_world_size())
    for linear in model:
        linear.weight = nn.Parameter(TwoTensor(linear.weight.detach(), linear.weight.detach().clone()))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), reshard_after_forward=True)
    for param in model.parameters():
        local = param._local_tensor
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = MethodType(before, local), MethodType(after, local)
    optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(3):
        inputs = torch.randn(len(ranks), 2, 8, generator=torch.Generator().manual_seed(step))
        loss = model(inputs[rank]).pow(2).sum()
        held = [part.untyped_storage().nbytes() for part in (model.read.a, model.read.b)]
        loss.backward()
        expected = [reference(inputs[one]).pow(2).sum() for one in ranks]
        torch.stack(expected).mean().backward()
        torch.testing.assert_close(loss.a, expected[rank])
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return held


def test_wrappers_that_an_extension_has_freed_are_freed_inside(four_ranks: Ranks) -> None:
    for before, after in ((_send_itself, _read_what_arrived), (_send_parts, _wrap_copies)):
        for held in four_ranks.run(_wrappers_inside, before, after):
            assert held == [0, 0]
