"""Which weights backward gathers is a matter of the model: ranks with batches of other lengths gather the same ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fully_shard
from tests.recording import recorded
from tests.test_graphs import Stages

pytestmark = pytest.mark.usefixtures("fake_group_of_four")

WIDTH = 24


class Layer(nn.Module):
    """A bias, a norm and weights as they are; subclasses make the weight out of several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b = nn.Parameter(torch.zeros(WIDTH))

    def weight(self) -> Tensor:
        return self.w

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(x) @ self.weight() + self.b)


class Projections(Layer):
    """Three weights in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH // 3, WIDTH)) for _ in range(3))

    def weight(self) -> Tensor:
        return torch.cat([self.q, self.k, self.v])


class WeightNorm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))

    def weight(self) -> Tensor:
        return self.w / self.w.norm(dim=1, keepdim=True) * self.scale


class LowRank(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.w.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 3)), nn.Parameter(torch.randn(3, WIDTH))

    def weight(self) -> Tensor:
        return self.w + 0.5 * (self.down @ self.up)


class Pruned(Layer):
    """A mask of zeros and ones, and how strongly it is heeded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH))
        self.register_buffer("strength", torch.tensor(0.3))

    def weight(self) -> Tensor:
        return self.w * (self.mask * torch.sigmoid(self.strength))


class Shifted(Layer):
    """What reads the shift is as cheap to compute again as to save, and no gradient's formula reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x.softmax(-1) + self.shift
        return x + y.sin() * y.cos() * y.exp()


class Positions(Layer):
    """The same with a matrix: what reads it is not computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x.softmax(-1).unsqueeze(1) + self.positions
        return x + (y.sin() * y.cos() * y.exp()).sum(1)


class Recomputed(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class ProductsSaved(Projections):
    """Selective checkpointing: products are saved, all else is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        keep = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


class Positioned(Layer):
    """As many rows of a table as the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(800, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(x + self.table[: x.shape[0]]))


class LooksUp(Layer):
    """A row of a table for each of the batch: the table meets the rows' numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(800, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(x + F.embedding(x.argmax(1), self.table)))


class Queries(Layer):
    """A row for each of the batch, by a product of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.query.expand(x.shape[0], WIDTH) @ self.w)


class Sigmoid(torch.autograd.Function):
    """Computes its result again in backward, by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return (x @ w).sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        result = (x @ w).sigmoid()
        inner = grad * result * (1 - result)
        return inner @ w.t(), x.t() @ inner


class ByHand(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + Sigmoid.apply(x, self.w)


class Noisy(Layer):
    """What is laid over the weight is another one when backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ (self.w + self.noise)
        self.noise.mul_(0.5)
        return x + torch.tanh(y)


class FrozenBehind(Layer):
    """A checkpointed region that no gradient flows through, and what reads its result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b * (x + checkpoint(self.inner, x.detach(), use_reentrant=False)) + x


class Attends(Layer):
    """In a checkpointed region, an operation with several results."""

    def attend(self, x: Tensor) -> Tensor:
        y = (self.norm(x) @ self.w + self.b).view(1, -1, 2, WIDTH // 2).transpose(1, 2)
        return x + F.scaled_dot_product_attention(y, y, y).transpose(1, 2).reshape(-1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False)


class Pools(Attends):
    def attend(self, x: Tensor) -> Tensor:
        return x + F.max_pool1d((x @ self.w).unsqueeze(0), 3, 1, 1).squeeze(0) + self.b.logsumexp(0)


class GradientsInForward(torch.autograd.Function):
    """Computes the gradients of its result beside it, as fused losses do, and saves no logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        logits = x @ w
        chances = logits.softmax(-1)
        ctx.save_for_backward(chances @ w.t(), x.t() @ chances)
        return logits.logsumexp(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        of_x, of_w = ctx.saved_tensors
        return of_x * grad, of_w * grad.mean()


class Fused(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Parameter(torch.randn(WIDTH, 7 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + GradientsInForward.apply(x, self.out)


class BehindTheSum(Layer):
    """A norm whose result goes on to all that follows: it is saved, as its vectors come with the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + F.gelu(x @ self.w + self.b))


class Small(Layer):
    """At most 16 wide, a product with one row is computed in another way once more; the bias is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, 12:], F.gelu(self.small(x[:, :12] * self.small.bias))], 1)


class Net(nn.Module):
    """One layer of each kind."""

    def __init__(self, without: tuple[type[Layer], ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for layer in LAYERS if layer not in without)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            x = one(x)
        return self.head(x)


NORM = {"norm.weight", "norm.bias"}
# With what backward gathers of each: the whole unit, whatever the formulas read of it.
LAYERS: dict[type[Layer], set[str]] = {
    Layer: {*NORM, "w", "b"},
    Projections: {*NORM, "q", "k", "v", "b"},
    WeightNorm: {*NORM, "w", "scale", "b"},
    LowRank: {*NORM, "w", "down", "up", "b"},
    Pruned: {*NORM, "w", "b"},
    Shifted: {"shift"},
    Positions: {"positions"},
    Recomputed: {"positions"},
    ProductsSaved: {*NORM, "q", "k", "v", "b"},
    Positioned: {*NORM, "table"},
    LooksUp: {*NORM, "table"},
    Queries: {"query", "w"},
    ByHand: {"w"},
    Noisy: {"w"},
    FrozenBehind: {"b", "inner.weight", "inner.bias"},
    Attends: {*NORM, "w", "b"},
    Pools: {"w", "b"},
    Fused: {"out"},
    BehindTheSum: {*NORM, "w", "b"},
    Small: {"small.weight", "small.bias"},
}
# A batch of one row is where Inductor and the partitioner choose otherwise.
LENGTHS: tuple[tuple[int, bool | None], ...] = ((1, False), (50, True))


def _step(backend: str, length: int, dynamic: bool | None) -> tuple[Stages, list[tuple[int, ...]]]:
    torch._dynamo.reset()
    model = Net()
    for one in model.layers:
        fully_shard(one, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    x = torch.randn(length, WIDTH, requires_grad=True)  # else the first layer's backward is another one
    with recorded(Stages()) as stages:
        out = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(x)
        node: Any = out.grad_fn
        while not hasattr(node, "saved_tensors"):
            node = node.next_functions[0][0]
        saved = [tuple(tensor.shape) for tensor in node.saved_tensors]
        out.sum().backward()
    return stages, saved


@pytest.mark.compat
@pytest.mark.parametrize("backend", ["passes", pytest.param("inductor", marks=pytest.mark.slow)])
def test_backward_gathers_the_same_for_every_length(backend: str) -> None:
    expected = {f"layers.{index}.{name}" for index, layer in enumerate(LAYERS) for name in LAYERS[layer]}
    expected |= {"head.weight", "head.bias"}
    buckets = set()
    for length, dynamic in LENGTHS if backend == "passes" else ((1, False), (700, False), (4, True)):
        stages, saved = _step(backend, length, dynamic)
        plan = stages["backward"].plan
        assert {fqn for bucket in plan.gathers for fqn in bucket.fqns} == expected, (length, dynamic)
        assert set(stages["joint"].plan.again) == expected
        buckets.add((stages["forward"].plan.gathers, plan.gathers, plan.reduces))
        # Nor is a weight, or what is made of weights alone, saved; a mask is, as an input, and the sum with the noise.
        whole = [(WIDTH, WIDTH), (WIDTH // 3, WIDTH), (WIDTH, WIDTH // 3), (5, WIDTH), (WIDTH, 5), (WIDTH, 3), (3, WIDTH)]
        assert [shape for shape in saved if shape in whole] == [(WIDTH, WIDTH)] * 2, (length, dynamic)
    assert len(buckets) == 1
