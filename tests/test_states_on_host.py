"""Optimizer states on the host: which of them, when they are copied, and how a memory budget decides about them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import CPUOffloadPolicy, configure, inspect
from fsdp_compile._torch_compat.subclasses import plain_tensors_in
from fsdp_compile.core.containers import tensors_in
from fsdp_compile.core.parts import local_of
from fsdp_compile.optim import StatesOnHost, on_host
from fsdp_compile.passes.budget.residency import AGAIN, MAY, choose
from fsdp_compile.passes.budget.standing import Standing
from fsdp_compile.passes.wire import copies
from tests.comparing import assert_same_params, batches, local_loss, loss_of, mine, reference_backward
from tests.models import EvenBlock, Stack, pair, shard, twins
from tests.on_ranks import on_two_ranks
from tests.ordering import CPU, History, watched
from tests.recording import planned
from tests.test_budget import GROUPS, HELD, KIB, PEAK, five_products
from tests.test_cost import TOY
from tests.test_optim_models import SmallStatesOnHost

# Two tensors of a matrix of 64 by 128.
STATES = 2 * 32 << 10


def _matrices(number: int = 4) -> list[nn.Parameter]:
    """With gradients; the last one is too small for its states to be worth a copy."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 128)) for _ in range(number)] + [nn.Parameter(torch.randn(64))]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def _matched(number: int = 4) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return _matrices(number), _matrices(number)


class OneByOne(StatesOnHost):
    """Copies the states of one parameter at a time."""

    _bucket_bytes = 1


class _Copies(TorchDispatchMode):
    """Lists the copies between the host and the device, and the steps in between."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {copies.launch_to_host: "away", copies.launch_to_device: "back"}
        if func in names:
            self.seen.append(names[func])
        elif "_foreach_addcdiv_" in str(func):
            self.seen.append("step")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("keep", "num_away"), [(0, 4), (STATES - 1, 4), (STATES, 3), ("130KiB", 2), ("1GiB", 0)])
def test_the_first_states_stay_as_far_as_there_is_room(keep: int | str, num_away: int) -> None:
    params, others = _matched()
    optimizer, reference = StatesOnHost(params, AdamW, keep=keep, foreach=True), AdamW(others)
    assert optimizer.state_bytes() == 4 * STATES
    for _ in range(3):
        with _Copies() as copied:
            optimizer.step()
        reference.step()
        assert copied.seen.count("away") == 2 * num_away
    assert copied.seen.count("back") == 2 * num_away
    assert optimizer.state_bytes() == 4 * STATES
    for one, other in zip(params, others):
        assert torch.equal(one, other)
        for name, value in optimizer.state[one].items():
            assert torch.equal(value, reference.state[other][name])


@pytest.mark.more
def test_states_of_eight_bits_are_copied_as_what_they_are_made_of() -> None:
    eight_bit = pytest.importorskip("torchao.optim").AdamW8bit
    params, others = _matched(2)
    for param, other in zip(params, others):  # 64 KiB of states are eight bits a number
        for one in (param, other):
            one.data = one.data.repeat(*[16] * (one.ndim - 1), 1)
            one.grad = torch.ones_like(one)
    optimizer, reference = StatesOnHost(params, eight_bit), eight_bit(others)
    expected = optimizer.state_bytes()
    for _ in range(2):
        optimizer.step()
        reference.step()
    assert optimizer._away == {*params[:2]}
    assert 2 * 2 * params[0].numel() <= optimizer.state_bytes() == pytest.approx(expected, rel=0.05)
    for one, other in zip(params, others):
        assert torch.equal(one, other)
        for name, value in optimizer.state[one].items():
            assert all(map(torch.equal, plain_tensors_in(value), plain_tensors_in(reference.state[other][name])))


def test_the_next_states_are_on_their_way_while_some_are_updated() -> None:
    optimizer = OneByOne(_matrices(3)[:3], AdamW, foreach=True)
    optimizer.step()
    with _Copies() as copied:
        optimizer.step()
    once = [one for one, other in zip(copied.seen, [None, *copied.seen]) if one != other]
    assert once == ["back", "step", "away", "back", "step", "away", "step", "away"]


def test_groups_schedules_and_counts_are_those_of_the_class() -> None:
    class Counting(AdamW):
        """Counts its steps in its groups, and steps by that."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
                group["weight_decay"] = 0.01 * group["steps"]
            return super().step(closure)

    params, others = _matched()
    made = [
        make([{"params": its[:2], "lr": 0.1}, {"params": its[2:3], "betas": (0.5, 0.9)}], lr=0.01)
        for make, its in ((lambda *a, **k: SmallStatesOnHost(a[0], Counting, **k), params), (Counting, others))
    ]
    for optimizer, its in zip(made, (params, others)):
        optimizer.add_param_group({"params": its[3:], "lr": 0.5})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            assert optimizer.step(lambda: torch.tensor(7.0)) == 7
            schedule.step()
    assert [group["steps"] for group in made[0].param_groups] == [3, 3, 3]
    ours, theirs = (one.state_dict() for one in made)
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], atol=0, rtol=0)
    for one, other in zip(params, others):
        assert torch.equal(one, other)


def test_states_that_are_there_before_the_first_step_leave_at_once() -> None:
    params, others = _matched()
    with _Copies() as copied:
        optimizer, reference = StatesOnHost(params, Adagrad, lr=0.1), Adagrad(others, lr=0.1)
    assert copied.seen == ["away"] * 4 and optimizer.state_bytes() == 4 * STATES // 2
    for _ in range(2):
        with _Copies() as copied:
            optimizer.step()
        reference.step()
        assert copied.seen.count("back") == 4
    for one, other in zip(params, others):
        assert torch.equal(one, other)


def test_a_parameter_without_a_gradient_leaves_its_states_where_they_are() -> None:
    params, others = _matched()
    optimizer, reference = StatesOnHost(params, AdamW), AdamW(others)
    for step in range(3):
        params[1].grad = others[1].grad = None if step == 1 else torch.ones(64, 128)
        with _Copies() as copied:
            optimizer.step()
        reference.step()
        assert copied.seen.count("back") == 2 * (0, 3, 4)[step]
    for one, other in zip(params, others):
        assert torch.equal(one, other)


def test_a_step_that_raises_can_be_taken_again() -> None:
    class Raising(AdamW):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if Raising.fails and any(param is bad for group in self.param_groups for param in group["params"]):
                raise KeyboardInterrupt
            return super().step(closure)

    params, others = _matched()
    bad = params[2]
    optimizer, reference = OneByOne(params, Raising), AdamW(others)
    optimizer.step()
    reference.step()
    Raising.fails = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    Raising.fails = False
    for param in params[:2]:
        param.grad = None  # these have been updated
    optimizer.step()
    reference.step()
    for one, other in zip(params, others):
        assert torch.equal(one, other)
    assert optimizer.state_bytes() == 4 * STATES and len(optimizer.state) == 5


def _train_with_two_streams(skips: Callable[..., bool]) -> set[str]:
    model, history = Stack(2, block=EvenBlock), History(skips)
    shard(model)
    optimizer = SmallStatesOnHost(model.parameters(), AdamW, foreach=False)
    with watched(history, model):
        for _ in range(3):
            model(torch.arange(8).view(2, 4)).sum().backward()
            optimizer.step()
            for one in tensors_in([*optimizer.state.values()]):
                local_of(one).sum()  # a checkpoint would read them
    return history.unordered


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize(
    ("left_out", "found"),
    [
        ((), ""),
        (("wait", "current", "to_device"), "current reads what to_device writes"),
        (("wait", "to_host", "current"), "to_host reads what current writes"),
        (("synchronize", "to_host"), f"{CPU} reads what to_host writes"),
    ],
)
def test_copies_and_steps_are_in_order(
    left_out: tuple[str, ...], found: str, is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_host, "_is_offloaded", lambda param: is_elsewhere)
    unordered = _train_with_two_streams(lambda *what: what == left_out)
    assert found in unordered if found else unordered == set()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer takes every shard for an offloaded one, and the CPU for the device of the model."""
    monkeypatch.setattr(on_host, "_is_offloaded", lambda param: True)


@pytest.mark.parametrize("is_elsewhere", [False, True])
@on_two_ranks
def test_offloaded_shards_train_as_the_unsharded_model(is_elsewhere: bool) -> None:
    """The mesh is of the CPU, where shards are the device's; those on the host are updated by copies of them."""
    reference, model = pair(offload_policy=CPUOffloadPolicy())
    optimizer, other = SmallStatesOnHost(model.parameters(), AdamW), AdamW(reference.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_host, "_is_offloaded", lambda param: is_elsewhere)
        for step in range(3):
            local_loss(model, step).backward()
            reference_backward(reference, batches(step))
            optimizer.step()
            other.step()
            other.zero_grad()
            optimizer.zero_grad()
    assert_same_params(model, reference, atol=1e-4)


@pytest.mark.usefixtures("elsewhere")
def test_a_class_updates_copies_of_offloaded_shards_on_the_device() -> None:
    seen: list[Tensor] = []

    class Seeing(AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.extend(self.param_groups[0]["params"])
            return super().step(closure)

    params, others = _matched()
    held = [param.data_ptr() for param in params]
    optimizer, reference = StatesOnHost(params, Seeing), AdamW(others)
    params[1].grad = others[1].grad = None
    for _ in range(3):
        optimizer.step()
        reference.step()
    assert [one for one in seen if any(one is param for param in params)] == 3 * [params[1]]  # it has no gradient
    assert [param.data_ptr() for param in params] == held
    for one, other in zip(params, others):
        assert torch.equal(one, other)
        state = optimizer.state.get(one, {})
        assert all(torch.equal(value, reference.state[other][name]) for name, value in state.items())
    assert {*optimizer.state} == {one for one in params if one.grad is not None}
    assert optimizer.state_bytes() == 4 * STATES
    reference.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("make", [AdamW, functools.partial(AdamW, fused=True), Adagrad])
def test_all_states_are_where_the_class_updates(make: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are small, or were loaded or made before the first step. The device is meta, which has no data."""
    seen: set[str] = set()
    monkeypatch.setattr(on_host, "owners_device", lambda param: torch.device("meta"))
    monkeypatch.setattr(copies, "launch_over", lambda written, read: None)
    params, others = _matched(2)
    reference = make(others)
    reference.step()

    def note(optimizer: Optimizer) -> None:
        for param in optimizer.param_groups[0]["params"]:
            assert param.grad is not None
            seen.update(one.device.type for one in (param, param.grad, *optimizer.state[param].values()) if one.ndim)
            seen.update(one.device.type for one in optimizer.state[param].values() if optimizer.defaults.get("fused"))

    def with_note(*args: Any, **settings: Any) -> Optimizer:
        class Noting(make.func if isinstance(make, functools.partial) else make):  # type: ignore[misc]
            def step(self, closure: Any = None) -> Any:
                note(self)

        return Noting(*args, **settings)

    optimizer = StatesOnHost(params, with_note, **getattr(make, "keywords", {}))
    optimizer.load_state_dict(reference.state_dict())
    optimizer.step()
    assert seen == {"meta"}


def test_a_copy_steps_as_the_optimizer_does() -> None:
    params, others = _matched(2)
    optimizer, reference = StatesOnHost(params, AdamW), AdamW(others)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    for one, other in zip(copied.param_groups[0]["params"], others):
        one.grad = other.grad
    for one in (copied, reference, reference):
        one.step()
    for one, other in zip(copied.param_groups[0]["params"], others):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("elsewhere")
def test_a_step_on_copies_that_raises_can_be_taken_again() -> None:
    class Raising(AdamW):
        raises = False

        def step(self, closure: Any = None) -> Any:
            if self.raises and self.param_groups[0]["params"][0].shape == (64,):
                raise ArithmeticError
            return super().step(closure)

    params, others = _matched()
    optimizer, reference = OneByOne(params, Raising), AdamW(others)
    optimizer.step()
    reference.step()
    optimizer._inner.raises = True  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        optimizer.step()
    reference.param_groups[0]["params"] = others[:4]
    reference.step()  # the matrices were updated before it raised
    optimizer._inner.raises = False  # type: ignore[attr-defined]
    optimizer.param_groups[0]["params"] = params[4:]
    optimizer.step()
    reference.param_groups[0]["params"] = others[4:]
    reference.step()
    assert {*optimizer.state} == {*params} and not optimizer._inner.param_groups
    for one, other in zip(params, others):
        assert torch.equal(one, other)


@pytest.mark.parametrize("said", ["much", -1, True, 0.5])
def test_what_is_no_number_of_bytes_is_refused(said: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"keep.*Give bytes, or text such as"):
        StatesOnHost(_matrices(), AdamW, keep=said)


# --- within a budget -------------------------------------------------------------------------------------------------


def _chosen(budget: int, states_bytes: int, **changes: Any) -> Any:
    """The best candidate, whose states are on the host where that is best of all that were tried."""
    profile = dataclasses.replace(TOY, **changes)
    best, lost = choose(five_products(), lambda _: budget * KIB, profile, GROUPS, MAY, states_bytes=states_bytes * KIB)
    states = Standing(profile, states_bytes * KIB)
    for one in (best, *lost):
        assert one.states_bytes == states.states_away(one.figures.peak_bytes, budget * KIB)
        assert one.states_s == states.states_seconds(one.states_bytes)
    fitting = [one.seconds for one in (best, *lost) if one.figures.peak_bytes <= budget * KIB]
    assert best.seconds == min(fitting, default=best.seconds)
    return best


def test_a_budget_has_states_on_the_host_only_as_far_as_they_do_not_fit() -> None:
    assert _chosen(1000, 100).states_bytes == 0
    best = _chosen(PEAK + 32 + 40, 100, host_bytes_per_s=1e13)  # copies cost next to nothing: everything is kept
    assert (best.figures.peak_bytes, best.states_bytes) == ((PEAK + 32) * KIB, 60 * KIB)


def test_what_saves_less_than_the_states_leaves_them_the_room() -> None:
    """Copies over a slow link cost more than the gathers that keeping parameters would save."""
    best = _chosen(PEAK + 32 + 68, 100, host_bytes_per_s=1e6)
    assert (best.figures.peak_bytes, best.states_bytes) == (PEAK * KIB, 0)
    cheap = _chosen(PEAK + 32 + 68, 100, host_bytes_per_s=1e13)
    assert cheap.figures.seconds < best.figures.seconds and cheap.states_bytes == 32 * KIB


def test_a_budget_below_the_peak_has_all_states_on_the_host() -> None:
    best = _chosen(HELD, 100)
    assert best.figures.peak_bytes > HELD * KIB and best.states_bytes == 100 * KIB


@pytest.mark.filterwarnings("ignore:memory_budget is")
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
@on_two_ranks
def test_a_compiled_model_and_its_optimizer_are_within_one_budget(share: float) -> None:
    reference, model = twins(lambda: Stack(2, dim=128, block=EvenBlock))
    optimizer = StatesOnHost(shard(model).parameters(), AdamW, lr=3e-3)
    other, states_bytes = AdamW(reference.parameters(), lr=3e-3), optimizer.state_bytes()
    assert states_bytes == 2 * 2 * 2 * 64 * KIB  # of the blocks' matrices; those of embedding and head are small
    configure(model, memory_budget="1GiB", may=MAY, optimizer=optimizer)
    plan = planned(model, mine())
    assert plan.choice is not None and plan.choice.kept_states_bytes == states_bytes
    least = next(one.peak_bytes for one in plan.choice.lost if one.name == AGAIN)
    configure(model, memory_budget=least + int(share * states_bytes) if share else 1, may=MAY, optimizer=optimizer)
    torch._dynamo.reset()
    run = torch.compile(model)
    with inspect(model) as report:
        for step in range(3):
            loss_of(run(mine(step))).backward()
            reference_backward(reference, batches(step))
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
    assert_same_params(model, reference, atol=2e-4)
    choice = report.joint.plan.choice
    assert choice is not None and choice.states_bytes == states_bytes
    loss_of(run(mine())).backward()
    with _Copies() as copied:
        optimizer.step()
    kept_bytes = states_bytes - copied.seen.count("back") * 64 * KIB
    assert kept_bytes <= choice.kept_states_bytes
    assert choice.is_met == bool(share) and "of states on the host for" in str(choice)
    if share:
        assert choice.chosen.peak_bytes + choice.kept_states_bytes <= choice.budget_bytes
        assert choice.kept_states_bytes - kept_bytes < 2 * 64 * KIB  # there is no room for the next matrix's
        assert 0 < kept_bytes < states_bytes
    else:
        assert kept_bytes == choice.kept_states_bytes == 0


@pytest.mark.filterwarnings("ignore:memory_budget is")
@pytest.mark.usefixtures("fake_group_of_four")
def test_a_budget_chooses_while_it_is_in_force() -> None:
    model = shard(Stack(2, dim=256, block=EvenBlock))
    optimizer = StatesOnHost(model.parameters(), AdamW, keep="1GiB")

    def step() -> int:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with _Copies() as copied:
            optimizer.step()
        optimizer.zero_grad()
        return copied.seen.count("away")

    def choose_none() -> None:
        configure(model, memory_budget=1, may=MAY, optimizer=optimizer)
        assert step() == 0  # it has not chosen yet
        planned(model)
        assert step() == 2 * 2 * 2

    for then in ("1GiB", None):
        choose_none()
        configure(model, memory_budget=then)
        assert step() == 0


def test_what_hears_of_every_optimizers_step_hears_of_one() -> None:
    heard: list[Optimizer] = []
    optimizer = SmallStatesOnHost(_matrices(), AdamW)
    handle = register_optimizer_step_post_hook(lambda its, args, kwargs: heard.append(its))
    optimizer.step()
    handle.remove()
    assert heard == [optimizer]


@pytest.mark.parametrize("said", ["AdamW", AdamW([nn.Parameter(torch.zeros(1))]), LBFGS])
def test_what_is_no_class_that_updates_a_few_parameters_is_refused(said: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer_class is of .*Give a class|LBFGS evaluates the model in its step"):
        StatesOnHost(_matrices(), said)


@pytest.mark.usefixtures("fake_group_of_four")
def test_what_a_budget_cannot_have_on_the_host_is_refused() -> None:
    model = shard(Stack(1))
    on_host = StatesOnHost(model.parameters(), AdamW)
    with pytest.raises(ValueError, match=r"optimizer has states that a memory_budget .* Give memory_budget as well"):
        configure(model, optimizer=on_host)
    with pytest.raises(ValueError, match=r"may=\('gather', 'recompute'\) has no 'offload'. Add it"):
        configure(model, memory_budget="1GiB", optimizer=on_host)
    with pytest.raises(ValueError, match=r"optimizer has no parameter of the model. Make it of model.parameters"):
        configure(model, memory_budget="1GiB", may=MAY, optimizer=StatesOnHost(_matrices(), AdamW))
    with pytest.raises(TypeError, match=r"optimizer is of AdamW, not of .*StatesOnHost"):
        configure(model, memory_budget="1GiB", may=MAY, optimizer=AdamW(model.parameters()))  # type: ignore[arg-type]
