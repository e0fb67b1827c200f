"""Which weights backward gathers is a matter of the model: ranks with batches of other lengths gather the same ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fully_shard
from fsdp_compile.passes import Plan
from tests.comparing import assert_same_grads
from tests.models import Stack, twins
from tests.on_ranks import on_two_ranks
from tests.recording import Wire, recorded
from tests.test_graphs import Stages, saved_tensors

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


def _step(length: int, dynamic: bool) -> tuple[Stages, list[tuple[int, ...]]]:
    torch._dynamo.reset()
    model = Net()
    for one in model.layers:
        fully_shard(one, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    x = torch.randn(length, WIDTH, requires_grad=True)  # else the first layer's backward is another one
    with recorded(Stages()) as stages:
        out = torch.compile(model, backend="passes", fullgraph=True, dynamic=dynamic)(x)
        saved = [tuple(one.shape) for one in saved_tensors(out)]
        out.sum().backward()
    return stages, saved


@pytest.mark.usefixtures("fake_group_of_four")
def test_backward_gathers_the_same_for_every_length() -> None:
    expected = {f"layers.{index}.{name}" for index, layer in enumerate(LAYERS) for name in LAYERS[layer]}
    expected |= {"head.weight", "head.bias"}
    buckets = set()
    # A batch of one row is where Inductor and the partitioner choose otherwise.
    for length, dynamic in ((1, False), (50, True)):
        stages, saved = _step(length, dynamic)
        plan = stages["backward"].plan
        assert {fqn for bucket in plan.gathers for fqn in bucket.fqns} == expected, (length, dynamic)
        assert set(stages["joint"].plan.again) == expected
        buckets.add((stages["forward"].plan.gathers, plan.gathers, plan.reduces))
        # Nor is a weight, or what is made of weights alone, saved; a mask is, as an input, and the sum with the noise.
        whole = [(WIDTH, WIDTH), (WIDTH // 3, WIDTH), (WIDTH, WIDTH // 3), (5, WIDTH), (WIDTH, 5), (WIDTH, 3), (3, WIDTH)]
        assert [shape for shape in saved if shape in whole] == [(WIDTH, WIDTH)] * 2, (length, dynamic)
    assert len(buckets) == 1


# --- sequences of one element, batches of no rows, graphs that reduce nothing -------------------------------------------


class Recurrence(nn.Module):
    """By hand, from a state of zeros that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        self.w_rec = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ self.w_in + h @ self.w_rec)
        return h


class Joined(nn.Module):
    """Input and state in one tensor, one product for both."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h = torch.tanh(self.w(torch.cat([x[:, t], F.dropout(h, 0.1)], dim=1)))
        return h


class Cells(nn.Module):
    """Two layers of torch's own cells, whose state is zeros unless one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        lower, upper = None, None
        for t in range(x.shape[1]):
            lower = self.lower(x[:, t], lower)
            upper = self.upper(lower[0], upper)
        assert upper is not None
        return upper


class States(nn.Module):
    """Each of the recurrences, beside the others."""

    def __init__(self) -> None:
        super().__init__()
        self.by_hand, self.joined, self.cells = Recurrence(), Joined(), Cells()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([one(x) for one in self.children()])


class LastNorm(nn.Module):
    """Attention, residual sums and norms, of which one is the last that computes; one part is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 3, 2 * WIDTH, 0.0, batch_first=True)
        self.again = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.up(x))
        y = y + checkpoint(self.again, y, use_reentrant=False)
        return self.norm(y).pow(2).sum(-1)


class Frozen(nn.Module):
    """What follows a checkpointed region is saved where it is much smaller than what goes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.base, x, use_reentrant=False).flatten(0, 1).mean(0)
        return (y.sin() * y.cos() * y.exp()) * x.mean(1)


def _sharded(model: nn.Module) -> nn.Module:
    for one in model.children():
        fully_shard(one, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


def _plans(make: Callable[[], nn.Module], x: Tensor, backend: str) -> tuple[Plan, Plan]:
    torch._dynamo.reset()
    with recorded(Stages()) as stages:
        torch.compile(_sharded(make()), backend=backend, fullgraph=True)(x).sum().backward()
    return stages["forward"].plan, stages["backward"].plan


def _gathered(plan: Plan) -> set[str]:
    return {fqn for bucket in plan.gathers for fqn in bucket.fqns}


@pytest.mark.parametrize(
    "make",
    [pytest.param(States, marks=pytest.mark.compat), lambda: Recurrence().requires_grad_(False)],
    ids=["trained", "frozen"],
)
def test_a_sequence_of_one_element_gathers_what_longer_ones_do(
    fake_group_of_four: None, make: Callable[[], nn.Module]
) -> None:
    needs_grad = not any(param.requires_grad for param in make().parameters())
    plans = [
        _plans(make, torch.randn(rows, length, WIDTH, requires_grad=needs_grad), backend)
        for rows, length, backend in ((2, 1, "passes"), (2, 2, "passes"), (1, 1, "decomposed"))
    ]
    assert _gathered(plans[0][1]) == {name for name, _ in make().named_parameters()}
    assert all(one == plans[0] for one in plans[1:])


def _first_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 3))


def _first_frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Tanh(), nn.Linear(WIDTH, 3))


@pytest.mark.parametrize(
    ("make", "x", "expected"),
    [
        (_first_embedding, torch.zeros(2, 3, dtype=torch.long), {"1.weight", "1.bias"}),
        (_first_frozen, torch.zeros(2, WIDTH), {"2.weight", "2.bias"}),
    ],
)
def test_a_unit_that_is_looked_up_or_gets_no_gradient_is_not_gathered_again(
    fake_group_of_four: None, make: Callable[[], nn.Module], x: Tensor, expected: set[str]
) -> None:
    for num_rows in (2, 1, 0):
        assert _gathered(_plans(make, x[:num_rows], "decomposed")[1]) == expected


@pytest.mark.filterwarnings("ignore:var_mean")
def test_a_batch_of_no_rows_gathers_what_others_do(fake_group_of_four: None) -> None:
    rows, none = (_plans(LastNorm, torch.randn(num_rows, 3, WIDTH), "decomposed") for num_rows in (2, 0))
    assert {"norm.weight", "block.linear1.weight", "block.norm1.weight", "again.0.weight"} <= _gathered(rows[1])
    assert none == rows


@pytest.mark.filterwarnings("ignore:var_mean")
def test_a_batch_of_no_rows_launches_in_the_order_of_others_where_units_are_kept(fake_group_of_four: None) -> None:
    def plan(num_rows: int) -> Plan:
        torch._dynamo.reset()
        model = Stack(2)
        fully_shard(model.layers[0], reshard_after_forward=True)
        fully_shard(model.layers[1], reshard_after_forward=False)
        fully_shard([model.norm, model.head], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=True)
        with recorded(Stages()) as stages:
            tokens = torch.zeros(num_rows, 5, dtype=torch.long)
            torch.compile(model, backend="decomposed", fullgraph=True)(tokens).sum().backward()
        return stages["backward"].plan

    rows = plan(2)
    assert _gathered(rows) == {fqn for fqn in _gathered(rows) if fqn.startswith("layers.0")} != set()
    assert plan(0) == rows


@pytest.mark.compat
def test_without_reductions_a_checkpointed_region_is_gathered_for_in_any_case(fake_group_of_four: None) -> None:
    for length in (1, 50):
        _, plan = _plans(Frozen, torch.randn(1, length, WIDTH, requires_grad=True), "passes")
        assert _gathered(plan) == {"base.weight", "base.bias"}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrence, self.up, self.norm = Recurrence(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(self.recurrence(x))).pow(3).sum() / 8


# Of each rank in each step: rows and length.
SIZES = (((2, 1), (0, 3)), ((2, 3), (2, 3)))


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:var_mean.*degrees of freedom:UserWarning")  # of no rows
@on_two_ranks
def test_ranks_with_one_element_and_with_no_rows_train_the_same() -> None:
    unsharded, model = twins(Whole)
    run = torch.compile(_sharded(model), backend="decomposed", fullgraph=True)
    launched: list[tuple[str, Any]] = []
    for step in range(2):
        batches = [torch.randn(*sizes[step], WIDTH, generator=torch.Generator().manual_seed(step)) for sizes in SIZES]
        with Wire() as wire:
            run(batches[dist.get_rank()]).backward()
        launched += wire.launches
        torch.stack([unsharded(batch) for batch in batches]).mean().backward()
        assert_same_grads(model, unsharded, atol=1e-5, rtol=1e-3)
        model.zero_grad()
        unsharded.zero_grad()
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, launched)
    assert launched and by_rank[0] == by_rank[1]
