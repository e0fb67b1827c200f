"""Parameters that modules read in unusual ways: they work, or they raise with the parameter's name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from fsdp_compile import fully_shard
from tests.ranks import Ranks
from tests.toy import assert_same_grads


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


def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 7)), nn.ReLU(), nn.Linear(7, 3)).eval()


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Halved())
    return model


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 7)), nn.ReLU(), nn.Linear(7, 3))


def _compare(make: Callable[[], nn.Module], backend: str | None) -> None:
    torch.manual_seed(0)
    unsharded = make()
    torch.manual_seed(0)
    sharded = fully_shard(make())
    run = sharded if backend is None else torch.compile(sharded, backend=backend)
    for step in range(2):
        x = torch.randn(dist.get_world_size(), 4, 5, 6, generator=torch.Generator().manual_seed(step))
        run(x[dist.get_rank()]).pow(2).mean().backward()
        torch.stack([unsharded(part).pow(2).mean() for part in x]).mean().backward()
        assert_same_grads(sharded, unsharded)
    assert all(isinstance(param, DTensor) for param in sharded.parameters())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("make", [Recurrent, normed, orthogonal, parametrized])
def test_reads_through_lists_and_parametrizations(two_ranks: Ranks, make: Any, backend: str | None) -> None:
    two_ranks.run(_compare, make, backend)


def test_reads_from_a_hook_of_an_inner_module(two_ranks: Ranks) -> None:
    for backend in (None, "aot_eager"):
        two_ranks.run(_compare, old_weight_norm, backend)


def _replaced(backend: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    fully_shard(model)
    whole = nn.Parameter(torch.randn(7, 6))
    model[0].weight = whole  # a full parameter in place of the shard: used as it is
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(4, 6)
    out = run(x)
    expected = copy.copy(x) @ whole.t() + model[0].bias.full_tensor()
    expected = expected @ model[1].weight.full_tensor().t() + model[1].bias.full_tensor()
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert whole.grad is not None and model[1].weight.grad is not None
    del model[0].weight
    assert not hasattr(model[0], "weight")
    with pytest.raises(AttributeError, match="weight"):
        _ = model[0].weight


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_weight_that_was_replaced_after_sharding(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(_replaced, backend)


class AroundTheProperty(nn.Module):
    """Reads a registered parameter without its attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner._parameters["weight"] if self.how == "_parameters" else next(iter(self.parameters()))
        return x @ weight


def _around(how: str) -> None:
    model = fully_shard(AroundTheProperty(how))
    with pytest.raises(RuntimeError, match=r"inner\.weight.*attribute"):
        model(torch.randn(2, 6))


def test_a_read_around_the_attribute_is_named(two_ranks: Ranks) -> None:
    for how in ("_parameters", "named_parameters"):
        two_ranks.run(_around, how)


def _two_grad_modes() -> None:
    """A first read without grad must not leave the later one without gradient."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.linear(x)
            return self.linear(x * 2) - target

    torch.manual_seed(0)
    unsharded = Teacher()
    sharded = fully_shard(copy.deepcopy(unsharded))
    x = torch.ones(3, 6)
    for model in (sharded, unsharded):
        model(x).pow(2).sum().backward()
    assert_same_grads(sharded, unsharded)


def test_a_read_without_grad_and_one_with(two_ranks: Ranks) -> None:
    two_ranks.run(_two_grad_modes)


def _raises_and_recovers() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.fail = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if self.fail:
                raise ArithmeticError("on purpose")
            return y

    torch.manual_seed(0)
    unsharded = Fails()
    sharded = fully_shard(copy.deepcopy(unsharded))
    x = torch.ones(3, 6)
    with pytest.raises(ArithmeticError, match="on purpose"):
        sharded(x)
    assert isinstance(sharded.linear.weight, DTensor)
    for model in (sharded, unsharded):
        model.fail = False
        model(x).pow(2).sum().backward()
    assert_same_grads(sharded, unsharded)


def test_a_forward_that_raised_leaves_nothing_behind(two_ranks: Ranks) -> None:
    two_ranks.run(_raises_and_recovers)
