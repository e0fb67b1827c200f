"""What the setters of FSDPModule do to communication: which unit gathers or reduces when, with whom, and how many at once.

The model is a tower of blocks whose sizes differ, so that a collective's size says whose it is.
"""

from __future__ import annotations

import copy
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import FSDPModule, fully_shard
from fsdp_compile.core.unit import unit_of, units_in
from fsdp_compile.eager.running import running
from fsdp_compile.passes.wire.ledger import ledger
from tests.comparing import assert_same_grads, loss_of, reference_backward
from tests.compiling import compiled
from tests.models import twins
from tests.on_ranks import on_two_ranks
from tests.processes import wait_until
from tests.recording import GATHER, REDUCE, WAIT, held_bytes

WIDTH = 8


class Wide(nn.Module):
    """Up and down again: 2 * WIDTH * hidden parameters, which two ranks share evenly."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(num_blocks: int) -> nn.Sequential:
    """Block i has i + 1 times the parameters of block 0."""
    return nn.Sequential(*(Wide(8 * (index + 1)) for index in range(num_blocks)))


def tower(num_blocks: int = 4) -> tuple[Any, Any]:
    """(unsharded, sharded): each block is a unit, and the root has no parameters of its own."""
    unsharded, model = twins(lambda: blocks(num_blocks))
    for block in model:
        fully_shard(block)
    return unsharded, fully_shard(model)


def block_of(numel: int) -> int:
    """The index of the block that has so many parameters; two neighbours that travel together are 2i + 1 of them."""
    return numel // (2 * WIDTH * 8) - 1


class Log(TorchDispatchMode):
    """What this rank sent, in order: ("gather", 2) is block 2's; in which groups; and how much was in flight at once."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self.groups: dict[str, set[str]] = {"gather": set(), "reduce": set()}
        self.most_in_flight = 0
        self._in_flight: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0].removesuffix("_out")
        if func.namespace not in ("fsdpc", "_c10d_functional"):
            return result
        if name == GATHER:
            self._note("gather", args[0].numel() * dist.get_world_size(), args[2])
        elif name == REDUCE:
            self._note("reduce", args[0].numel(), args[3])
            self._in_flight.append(result)
            self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        elif name == WAIT:
            self._in_flight = [one for one in self._in_flight if one is not args[0]]
        return result

    def _note(self, what: str, numel: int, group: str) -> None:
        self.events.append((what, block_of(numel)))
        self.groups[what].add(group)

    def of(self, what: str) -> list[int]:
        """The blocks of the gathers, or of the reductions, in order."""
        return [block for one, block in self.events if one == what]


def inputs(step: int) -> Tensor:
    """Every rank's in one step: [ranks, 3, WIDTH]."""
    return torch.randn(dist.get_world_size(), 3, WIDTH, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, step: int) -> Tensor:
    return loss_of(model(inputs(step)[dist.get_rank()]))


def assert_grads_of(model: nn.Module, unsharded: nn.Module, steps: range) -> None:
    """The gradients are those of all ranks' batches of these steps, and of nothing else."""
    unsharded.zero_grad()
    for step in steps:
        reference_backward(unsharded, inputs(step))
    assert_same_grads(model, unsharded)


# --- units of several modules


@on_two_ranks
def test_members_of_a_list_share_one_gather_and_one_reduction() -> None:
    unsharded, model = twins(lambda: blocks(2))
    fully_shard([model[0], model[1], model[1].up])
    fully_shard(model)
    assert isinstance(model[0], FSDPModule) and isinstance(model[1], FSDPModule)
    assert not isinstance(model[1].up, FSDPModule), "a member inside another one is that one's, and stays plain"
    unit, root = unit_of(model[0]), unit_of(model)
    assert units_in(model) == [root, unit] and unit_of(model[1]) is unit
    with Log() as log:
        loss(model, 0).backward()
    both = block_of(2 * WIDTH * (8 + 16))
    assert log.events == [("gather", both), ("gather", both), ("reduce", both)]  # forward, backward, backward
    assert_grads_of(model, unsharded, range(1))


@on_two_ranks
def test_a_list_may_be_outermost() -> None:
    unsharded, model = twins(lambda: blocks(2))
    fully_shard([model[0], model[1]])  # and not the model around them
    for step in range(2):
        loss(model, step).backward()
    assert_grads_of(model, unsharded, range(2))
    (unit,) = units_in(model)
    gathered = running(unit).gathered
    assert gathered is not None and not gathered.is_full


class Chunks(nn.Module):
    """A body, then a list unit of norm and head; the head may run once a chunk, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = Wide(8), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.num_chunks = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x))
        return torch.cat([self.head(chunk) for chunk in x.chunk(self.num_chunks)]) if self.num_chunks else x


def _chunks() -> tuple[Any, Any]:
    unsharded, model = twins(Chunks)
    fully_shard([model.norm, model.head], reshard_after_forward=True)
    return unsharded, fully_shard(model)


@on_two_ranks
def test_each_call_of_a_member_by_itself_has_a_reduction_of_its_own() -> None:
    """Backward from each chunk's loss, so that no more than one chunk's outputs are there at once."""
    unsharded, model = _chunks()
    model.num_chunks, num_chunks = 0, 3
    with Log() as log:
        hidden = model(inputs(0)[dist.get_rank()])
        ends = hidden.detach().requires_grad_()
        for chunk in ends.chunk(num_chunks):
            (loss_of(model.head(chunk)) / num_chunks).backward()
        assert len(log.of("reduce")) == num_chunks
        hidden.backward(ends.grad)
    assert len(log.of("reduce")) == num_chunks + 2  # the norm's part of the unit, and the root
    assert_grads_of(model, unsharded, range(1))
    assert held_bytes(model) == 0


@on_two_ranks
def test_calls_one_after_another_share_a_gather_and_a_reduction() -> None:
    unsharded, model = _chunks()
    with Log() as log:
        loss(model, 0).backward()
    assert (len(log.of("gather")), len(log.of("reduce"))) == (3, 2)  # the unit's are gathered again
    assert_grads_of(model, unsharded, range(1))
    assert held_bytes(model) == 0


@on_two_ranks
def test_a_member_may_be_skipped() -> None:
    unsharded, model = _chunks()
    for step, num_chunks in enumerate((1, 0, 1)):
        unsharded.num_chunks = model.num_chunks = num_chunks
        model.zero_grad()
        out = loss(model, step)
        unit = unit_of(model.head)
        assert unit is not None and running(unit).shared_use is None, "the root's forward ends it"
        out.backward()
        assert_grads_of(model, unsharded, range(step, step + 1))
        assert (model.head.weight.grad is None) == (num_chunks == 0)
        assert held_bytes(model) == 0


# --- the order of gathers


def _order(unsharded: Any, model: Any) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What a forward and a backward send, in the second step: in the first one the order is not known yet."""
    loss(model, 0).backward()
    with Log() as forward:
        for index, block in enumerate(model):
            block.register_forward_pre_hook(lambda *unused, at=index: forward.events.append(("compute", at)))
        out = loss(model, 1)
    with Log() as backward:
        out.backward()
    assert_grads_of(model, unsharded, range(2))
    return forward.events, backward.events


@on_two_ranks
def test_gathers_run_one_unit_ahead_in_forward_and_in_backward() -> None:
    forward, backward = _order(*tower())
    assert forward == [
        ("gather", 0),
        ("gather", 1), ("compute", 0),
        ("gather", 2), ("compute", 1),
        ("gather", 3), ("compute", 2),
        ("compute", 3),
    ]  # fmt: skip
    assert backward == [
        ("gather", 3), ("gather", 2), ("reduce", 3),
        ("gather", 1), ("reduce", 2),
        ("gather", 0), ("reduce", 1),
        ("reduce", 0),
    ]  # fmt: skip


@on_two_ranks
def test_a_unit_launches_the_gathers_that_its_forward_was_told_to() -> None:
    unsharded, model = tower()
    model[0].set_modules_to_forward_prefetch([model[2], model[1]])  # out of turn
    model[1].set_modules_to_forward_prefetch([model[3]])
    forward, backward = _order(unsharded, model)
    assert forward == [
        ("gather", 0),
        ("gather", 2), ("gather", 1), ("compute", 0),
        ("gather", 3), ("compute", 1),
        ("compute", 2),
        ("compute", 3),
    ]  # fmt: skip
    assert [block for what, block in backward if what == "gather"] == [3, 2, 1, 0]


@on_two_ranks
def test_a_unit_launches_the_gathers_that_its_backward_was_told_to() -> None:
    unsharded, model = tower()
    model[3].set_modules_to_backward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])
    forward, backward = _order(unsharded, model)
    assert [block for what, block in forward if what == "gather"] == [0, 1, 2, 3]
    assert backward == [
        ("gather", 3), ("gather", 1), ("gather", 2), ("reduce", 3),
        ("gather", 0), ("reduce", 2),
        ("reduce", 1),
        ("reduce", 0),
    ]  # fmt: skip


# --- reductions in flight


@on_two_ranks
def test_so_many_reductions_are_in_flight_as_there_may_be() -> None:
    """One by default; the largest number under a root holds, and it may change between steps."""
    unsharded, model = tower()
    in_flight = []
    for step, (unit, num_buffers) in enumerate(((None, 1), (model, 1), (model[0], 2), (model, 4))):
        if unit is not None:
            unit.set_reduce_scatter_max_input_buffers(num_buffers)
        with Log() as log:
            loss(model, step).backward()
        assert log.of("reduce") == [3, 2, 1, 0]
        in_flight.append(log.most_in_flight)
    assert in_flight == [1, 1, 2, 4]
    assert_grads_of(model, unsharded, range(4))


def without_grad(model: nn.Module) -> list[str]:
    return [fqn for fqn, param in model.named_parameters() if param.grad is None]


@on_two_ranks
def test_reductions_stay_in_flight_until_the_last_backward() -> None:
    unsharded, model = tower()
    model.set_is_last_backward(False)
    loss(model, 0).backward()
    assert without_grad(model) == ["0.up.weight", "0.down.weight"], "the unit that backward left last is in flight"
    loss(model, 1).backward()
    assert not without_grad(model)  # its reduction of the first backward was waited for in the second
    model.set_is_last_backward(True)
    loss(model, 2).backward()
    assert_grads_of(model, unsharded, range(3))


@on_two_ranks
def test_what_was_set_on_a_block_holds_for_the_root_that_comes_later() -> None:
    unsharded, model = twins(lambda: blocks(2))
    for block in model:
        fully_shard(block)
    model[1].set_is_last_backward(False)
    fully_shard(model)
    loss(model, 0).backward()
    assert without_grad(model) == ["0.up.weight", "0.down.weight"]
    model.set_is_last_backward(True)
    loss(model, 1).backward()
    assert_grads_of(model, unsharded, range(2))

    other = copy.deepcopy(unsharded)
    fully_shard(other[1]).set_manual_backward_finalization(True)
    fully_shard(other)
    loss(other, 0).backward()
    assert without_grad(other), "nobody has finalized this backward yet"
    other.finalize_backward()
    assert_grads_of(other, unsharded, range(1))


@on_two_ranks
def test_a_backward_is_finalized_outside_of_it() -> None:
    _, model = tower()
    model.set_manual_backward_finalization(True)
    refused = []

    def finalize(grad: Tensor) -> None:
        for call in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
            with pytest.raises(RuntimeError, match=r"(must be called after backward completes|cannot change mode during backward)") as error:
                call()
            refused.append(str(error.value))

    hidden = model(inputs(0)[dist.get_rank()])
    hidden.register_hook(finalize)
    loss_of(hidden).backward()
    assert len(refused) == 2
    with pytest.raises(RuntimeError, match=r"Call finalize_backward\(\) first"):
        model.set_manual_backward_finalization(False)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)


# --- with whom


@on_two_ranks
def test_reductions_have_a_group_of_their_own_on_request() -> None:
    unsharded, model = tower()
    own = {param.mesh.group for unit in units_in(model) for param in unit.params}
    for step, separate in enumerate((False, True, False)):
        if step:
            model.set_separate_reduce_scatter_group(separate)
        with Log() as log:
            loss(model, step).backward()
        assert log.groups["gather"] == own
        if separate:
            assert len(log.groups["reduce"]) == 1 and not log.groups["reduce"] & own
        else:
            assert log.groups["reduce"] == own
    assert_grads_of(model, unsharded, range(3))


# --- what gradients are divided by


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
@on_two_ranks
def test_a_divide_factor_is_that_of_one_unit(path: str) -> None:
    unsharded, model = tower(2)
    model[1].set_gradient_divide_factor(5.0)
    model.set_gradient_divide_factor(3.0)  # of the root, which has no parameters: it does not reach the blocks
    loss_of(compiled(model, path)(inputs(0)[dist.get_rank()])).backward()
    reference_backward(unsharded, inputs(0))
    for param in unsharded[1].parameters():
        param.grad.mul_(dist.get_world_size() / 5.0)
    assert_same_grads(model, unsharded)


# --- process groups for reductions: one for each set of ranks, however often they are switched on


def _counts() -> tuple[int, int]:
    """Process groups and open files of this process."""
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


def _sharded() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


@on_two_ranks
def test_switching_often_makes_one_group() -> None:
    model = _sharded()
    model.set_separate_reduce_scatter_group(True)
    model(torch.ones(2, 4)).sum().backward()
    first = _counts()
    for turn in range(50):
        model.set_separate_reduce_scatter_group(turn % 2 == 1)
    another = _sharded()
    another.set_separate_reduce_scatter_group(True)
    for one in (model, another):
        one(torch.ones(2, 4)).sum().backward()
    assert _counts() == first


def _watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fsdp_compile lookout"]


@on_two_ranks
def test_a_new_world_has_its_own(tmp_path: Any) -> None:
    def world(number: int) -> None:
        where = f"file://{tmp_path}/rendezvous.{number}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)

    rank = dist.get_rank()
    dist.destroy_process_group()
    counts = []
    for number in range(3):
        world(number)
        model = _sharded()
        model.set_separate_reduce_scatter_group(True)
        model(torch.ones(2, 4)).sum().backward()
        assert model[0].weight.grad is not None
        counts.append(_counts())
        assert ledger.is_kept, "ranks of this world are not compared"
        dist.destroy_process_group()
    world(3)
    model = _sharded()  # before the thread that watched the last world has seen that it is gone
    wait_until(lambda: not _watching(), "it has")
    model(torch.ones(2, 4)).sum().backward()
    assert ledger.is_kept and len(_watching()) == 1
    assert counts[0][0] == counts[1][0] == counts[2][0]
