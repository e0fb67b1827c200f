"""check_parity is a trial: training goes on as if it had not been called, and it says what it did not compare."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import check_parity, fully_shard
from tests.comparing import assert_same_grads, batches, loss_of, reference_backward
from tests.models import Block, Stack, pair, shard
from tests.ranks import Ranks


def _tokens(step: int) -> Tensor:
    return batches(step)[dist.get_rank()]


def _between_two_backwards(path: str) -> None:
    unsharded, model = pair()
    run: Any = model if path == "eager" else torch.compile(model, backend=path)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)  # type: ignore[operator]
        step = int(sync)
        loss_of(run(_tokens(step))).backward()
        reference_backward(unsharded, batches(step))
        parity = check_parity(model, _tokens(2), loss=loss_of)
        assert parity and parity.num_params == len(list(model.parameters()))
    assert_same_grads(model, unsharded)


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
def test_an_accumulation_goes_on(two_ranks: Ranks, path: str) -> None:
    two_ranks.run(_between_two_backwards, path)


class Lying(Block):
    def forward(self, x: Tensor) -> Tensor:
        factor = 2 if torch.compiler.is_compiling() else 1
        return x + factor * self.down(torch.relu(self.up(self.norm(x))))


def _without_sync() -> None:
    torch.manual_seed(0)
    model = Stack(2)
    model.layers[1] = Lying()
    shard(model)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    parity = check_parity(model, _tokens(0), loss=loss_of)
    assert not parity and "layers.1.up.weight" in {one.name for one in parity.differences}


def test_gradients_are_compared_without_sync_too(two_ranks: Ranks) -> None:
    two_ranks.run(_without_sync)


def _between_forward_and_backward() -> None:
    unsharded, model = pair()
    loss = loss_of(model(_tokens(0)))
    assert check_parity(model, _tokens(1), loss=loss_of)
    loss.backward()
    reference_backward(unsharded, batches(0))
    assert_same_grads(model, unsharded)


def test_a_forward_that_awaits_its_backward_gets_it(two_ranks: Ranks) -> None:
    two_ranks.run(_between_forward_and_backward)


def _gathered_by_hand() -> None:
    _, model = pair()
    model.unshard()  # type: ignore[operator]
    whole = model.head.weight
    assert check_parity(model, _tokens(1), loss=loss_of)
    assert model.head.weight is whole
    assert torch.isfinite(whole).all() and whole.untyped_storage().nbytes() > 0
    model.reshard()  # type: ignore[operator]


def test_what_was_gathered_by_hand_stays(two_ranks: Ranks) -> None:
    two_ranks.run(_gathered_by_hand)


def _optimizer_in_backward() -> None:
    _, model = pair()
    steps: list[str] = []
    for fqn, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, fqn=fqn: steps.append(fqn))  # type: ignore[misc]
    before = [param.to_local().clone() for param in model.parameters()]
    assert check_parity(model, _tokens(0), loss=loss_of)
    assert not steps
    assert all(torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters()))
    loss_of(model(_tokens(0))).backward()
    assert sorted(steps) == sorted(fqn for fqn, _ in model.named_parameters())


def test_an_optimizer_in_backward_does_not_step(two_ranks: Ranks) -> None:
    two_ranks.run(_optimizer_in_backward)


class Restless(nn.Module):
    """Draws from every generator, counts its calls, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.seen: list[int] = []

    @torch.compiler.disable
    def draw(self) -> float:
        import numpy

        self.calls += 1
        self.seen.append(self.calls)
        return random.random() + float(numpy.random.rand())

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(self.norm(x * x))) * self.draw()


def _draws() -> list[float]:
    import numpy

    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def _restless() -> None:
    import numpy

    model = fully_shard(Restless())

    def seed() -> None:
        random.seed(3)
        numpy.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = _draws()
    seed()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    y = 2 * x  # whose graph is the caller's
    assert check_parity(model, y, loss=loss_of)
    assert _draws() == expected
    assert (model.calls, model.seen, model.training) == (0, [], True)
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
    assert x.grad is None
    y.sum().backward()


def test_generators_buffers_attributes_and_inputs_are_as_before(two_ranks: Ranks) -> None:
    pytest.importorskip("numpy")
    two_ranks.run(_restless)


def _nothing() -> tuple[str, str]:
    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = fully_shard(Pass())
    parity = check_parity(model, torch.ones(2, 2, requires_grad=True), loss=loss_of)
    assert not parity
    with pytest.raises(ValueError, match="Pass: the loss has no gradient"):
        check_parity(model, torch.ones(2, 2), loss=loss_of)
    partly = Stack(1)
    shard(partly)
    partly.head.weight.requires_grad_(False)
    return str(parity), str(check_parity(partly, _tokens(0), loss=loss_of))


def test_it_says_what_was_not_compared(two_ranks: Ranks) -> None:
    nothing, partly = two_ranks.run(_nothing)[0]
    assert nothing == (
        "nothing to compare: none of 2 parameters gets a gradient, eagerly or by aot_eager; the loss is the same"
    )
    assert partly == "eager and aot_eager agree: the loss and the gradients of 9 parameters; 1 more get none"


class Keywords(nn.Module):
    """Has keyword arguments that check_parity has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, *, loss: Any = None, model: Any = None) -> Tensor:
        out = self.linear(input_ids)
        return out.sum() if loss is None else (out * loss).sum()


def _keywords() -> None:
    model = fully_shard(Keywords())
    x = torch.ones(2, 4)
    assert check_parity(model, input_ids=x)
    assert check_parity(model, input_ids=x, model=3)
    assert check_parity(model, x, model=3)
    assert check_parity(model, {"input_ids": x, "loss": x})
    with pytest.raises(TypeError, match=r"function of the model.s output.*\{.loss.: \.\.\.\}"):
        check_parity(model, input_ids=x, loss=x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the model and its inputs, but got Tensor"):
        check_parity(x, model)  # type: ignore[arg-type]


def test_inputs_are_given_as_to_the_model(two_ranks: Ranks) -> None:
    two_ranks.run(_keywords)


def _refused() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_manual_backward_finalization(True)
    model(torch.ones(2, 4)).sum().backward()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match=r"finalize_backward.*Call wait"):
        check_parity(model, torch.ones(2, 4), loss=loss_of)
    handle.wait()
    model(torch.ones(2, 4)).sum().backward()
    assert check_parity(model, torch.ones(2, 4), loss=loss_of)
    model.finalize_backward()
    expected = dist.get_world_size() * 2.0 * 2 / dist.get_world_size()
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), expected))

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            check_parity(self, x, loss=loss_of)
            return x

    with pytest.raises(RuntimeError, match="inside a forward"):
        fully_shard(Asks(4, 4))(torch.ones(2, 4))


def test_it_is_refused_in_the_middle_of_a_step(two_ranks: Ranks) -> None:
    two_ranks.run(_refused)
