"""What an all-gather extension is given lies where it lay the first time, so it may return without a copy."""

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
from tests.models import Checkpointed, Stack
from tests.ranks import Ranks

_KEEPS = ("detach", "clone", "slice", "view", "as_strided", "new_zeros", "empty_like", "_to_copy", "split")


class Plain(Tensor):
    """A weight that is sent as it is, and read as it arrives: no copy is ever made."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Plain:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner_args, inner_kwargs = pytree.tree_map_only(Plain, lambda one: one.inner, (args, kwargs or {}))
        out = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            return args[0]
        keeps = func.overloadpacket.__name__ in _KEEPS
        return pytree.tree_map_only(Tensor, cls, out) if keeps else out

    def __tensor_flatten__(self) -> tuple[list[str], type]:
        return ["inner"], type(self)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Plain:
        return meta(tensors["inner"])

    def __repr__(self, **kwargs: Any) -> str:
        return f"{type(self).__name__}({self.inner!r})"

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


class InBytes(Plain):
    """Sent as eight-bit floats, read through a subclass around what arrives: as float8 of torchao."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner.to(torch.float8_e5m2),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            assert isinstance(out, Widened)
            return None
        return Widened(gathered, param_dtype), (gathered,)


class Widened(Tensor):
    """Eight-bit floats that compute as ``dtype``."""

    @staticmethod
    def __new__(cls, narrow: Tensor, dtype: torch.dtype) -> Widened:
        return Tensor._make_wrapper_subclass(cls, narrow.size(), strides=narrow.stride(), dtype=dtype)

    def __init__(self, narrow: Tensor, dtype: torch.dtype) -> None:
        self.narrow = narrow

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.as_strided.default):
            return cls(func(args[0].narrow, *args[1:]), args[0].dtype)
        args, kwargs = pytree.tree_map_only(Widened, lambda one: one.narrow.to(one.dtype), (args, kwargs or {}))
        return func(*args, **kwargs)


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


def _as_read(subclass: type[Plain], weight: Tensor) -> Tensor:
    return weight.to(torch.float8_e5m2).to(weight.dtype) if subclass is InBytes else weight


def _with_extensions(model: Stack, subclass: type[Plain]) -> Stack:
    for layer in model.layers:
        for linear in (layer.up, layer.down):
            linear.weight = nn.Parameter(subclass(linear.weight.detach()))
    return model


def _shard(model: Stack, fn: Callable[..., Any] = fully_shard, **settings: Any) -> Stack:
    for layer in model.layers:
        fn(layer, **settings)
    return fn(model, **settings)


def _train(subclass: type[Plain], dim: int, make: type[Stack], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    reference = make(dim=dim)
    model = _shard(_with_extensions(copy.deepcopy(reference), subclass), **settings)
    optims = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
    for step in range(4):
        inputs = batches(step)
        loss = loss_of(model(inputs[dist.get_rank()]))
        loss.backward()
        expected = reference_backward(reference, inputs)
        torch.testing.assert_close(mean_over_ranks(loss), expected, atol=1e-6, rtol=1e-5)
        assert_same_grads(model, reference)
        for optim in optims:
            optim.step()
            optim.zero_grad()


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("subclass", [Plain, Copied, Released])
def test_trains_like_the_unsharded_model(two_ranks: Ranks, subclass: type[Plain], regather: bool) -> None:
    two_ranks.run(_train, subclass, 16, Stack, {"reshard_after_forward": regather})


@pytest.mark.parametrize("subclass", [Plain, Copied])
def test_a_short_or_empty_shard_changes_nothing(three_ranks: Ranks, subclass: type[Plain]) -> None:
    for dim in (16, 4):
        three_ranks.run(_train, subclass, dim, Stack, {})


def test_checkpointing_recomputes_in_the_same_storages(two_ranks: Ranks) -> None:
    two_ranks.run(_train, Plain, 16, Checkpointed, {})


def _sharded_in_the_second_dimension() -> None:
    def second(param: nn.Parameter) -> Shard | None:
        return Shard(1) if isinstance(param, Plain) and param.shape[1] % 2 == 0 else None

    for subclass in (Plain, Copied):
        _train(subclass, 16, Stack, {"shard_placement_fn": second})


def test_shards_of_the_second_dimension_come_in_order(two_ranks: Ranks) -> None:
    two_ranks.run(_sharded_in_the_second_dimension)


def _alone() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for subclass in (Plain, Copied):
        _train(subclass, 16, Stack, {"mesh": mesh})


def test_a_lone_shard_is_not_what_is_freed(two_ranks: Ranks) -> None:
    two_ranks.run(_alone)


def _bytes() -> None:
    torch.manual_seed(0)
    reference = Stack()
    model = _shard(_with_extensions(copy.deepcopy(reference), InBytes))
    for step in range(3):
        narrowed = copy.deepcopy(reference)
        with torch.no_grad():
            for layer in narrowed.layers:
                for linear in (layer.up, layer.down):
                    linear.weight.copy_(_as_read(InBytes, linear.weight))
        inputs = batches(step)
        loss_of(model(inputs[dist.get_rank()])).backward()
        reference_backward(narrowed, inputs)
        assert_same_grads(model, narrowed)
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), reference.parameters()):
                ours.mul_(0.9)
                ours.grad = None
                theirs.mul_(0.9)


def test_eight_bits_are_gathered_where_they_were(two_ranks: Ranks) -> None:
    two_ranks.run(_bytes)


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


def _releases() -> None:
    for subclass, while_used in ((_Watched, 8 * 8 * 4), (_WatchedAndReleased, 0)):
        assert _held(fully_shard, subclass) == [while_used, 0, 0]
        if while_used or torch.__version__ >= (2, 15):  # FSDP2 did not ask before
            assert _held(fsdp2, subclass) == [while_used, 0, 0]


def test_what_arrived_is_held_as_long_as_the_extension_says(two_ranks: Ranks) -> None:
    two_ranks.run(_releases)


def _beside_fsdp2() -> None:
    torch.manual_seed(0)
    reference = Stack(dim=16)
    losses = []
    for fn in (fully_shard, fsdp2):
        # FSDP2 leaves the padding of uneven shards to the extension: only even ones are compared.
        model = copy.deepcopy(reference)
        for layer in model.layers:
            layer.down.weight = nn.Parameter(Plain(layer.down.weight.detach()))
        model = _shard(model, fn)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for step in range(3):
            loss = loss_of(model(batches(step)[dist.get_rank()]))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_losses_are_those_of_fsdp2(two_ranks: Ranks) -> None:
    two_ranks.run(_beside_fsdp2)


def _output_is_the_weight() -> None:
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


def test_a_weight_that_a_module_returns_stays(two_ranks: Ranks) -> None:
    two_ranks.run(_output_is_the_weight)


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


def _raises(step: int) -> None:
    """In the first step, or the second, in the second extension of a block; the steps after it are right."""
    torch.manual_seed(0)
    reference = Stack()
    model = copy.deepcopy(reference)
    for index, layer in enumerate(model.layers):
        layer.up.weight = nn.Parameter(Plain(layer.up.weight.detach()))
        layer.down.weight = nn.Parameter((_Moody if index == 1 else Plain)(layer.down.weight.detach()))
    _shard(model)
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


@pytest.mark.parametrize("step", [0, 2])
def test_after_an_extension_that_raised_the_next_step_is_right(two_ranks: Ranks, step: int) -> None:
    two_ranks.run(_raises, step)


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
