"""Our passes beside the user's: they compose, they leave foreign graphs alone, and being displaced is noticed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx, nn

from fsdp_compile import _torch_compat as compat
from fsdp_compile import fully_shard, install_passes
from fsdp_compile._graph_path import ComposedPass, JointPass, manager
from fsdp_compile.passes import GraphRecord, ScheduleInPlannedOrder, source_hash
from fsdp_compile.passes._torch_compat import CustomGraphPass

pytestmark = pytest.mark.usefixtures("fake_group_of_four", "fresh_config")


class Theirs(CustomGraphPass):
    """A user's pass: counts the graphs it saw."""

    def __init__(self, uuid: str | None = "theirs") -> None:
        self.seen = 0
        self._uuid = uuid

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += 1

    def uuid(self) -> str | None:
        return self._uuid


@pytest.fixture
def fresh_config() -> Iterator[None]:
    """Settings as a process finds them before its first fully_shard."""
    torch._dynamo.reset()
    joint = compat.get_joint_pass()
    with (
        inductor_config.patch(
            post_grad_custom_pre_pass=None,
            reorder_for_compute_comm_overlap=False,
            reorder_for_compute_comm_overlap_passes=[],
        ),
        compat.no_compile_caches(),
    ):
        compat.set_joint_pass(None)
        yield
    compat.set_joint_pass(joint)


@pytest.fixture
def records() -> Iterator[list[GraphRecord]]:
    seen: list[GraphRecord] = []
    manager.observers.append(seen.append)
    yield seen
    manager.observers.remove(seen.append)


def step(model: nn.Module) -> None:
    torch.compile(model, fullgraph=True)(torch.ones(2, 8)).sum().backward()


def stages(records: list[GraphRecord]) -> list[str]:
    return [record.stage for record in records]


def test_a_pass_that_was_there_before_still_runs(records: list[GraphRecord]) -> None:
    theirs = Theirs()
    inductor_config.post_grad_custom_pre_pass = theirs
    step(fully_shard(nn.Linear(8, 8)))
    assert theirs.seen == 2 and stages(records) == ["joint", "forward", "backward"]
    composed = compat.get_post_grad_pass()
    assert isinstance(composed, ComposedPass) and composed.uuid() == ("theirs", source_hash())


def test_a_pass_without_uuid_keeps_the_cache_off() -> None:
    inductor_config.post_grad_custom_pre_pass = Theirs(uuid=None)
    install_passes()
    assert not compat.get_post_grad_pass().uuid()


def test_a_joint_pass_that_was_there_before_still_runs(records: list[GraphRecord]) -> None:
    seen: list[fx.GraphModule] = []

    def theirs(module: fx.GraphModule, inputs: object) -> fx.GraphModule:
        seen.append(module)
        return module

    compat.set_joint_pass(theirs)
    step(fully_shard(nn.Linear(8, 8)))
    assert len(seen) == 1 and stages(records)[0] == "joint"


def test_a_displaced_pass_warns_and_the_numbers_stay(records: list[GraphRecord]) -> None:
    model = fully_shard(nn.Linear(8, 8))
    theirs = Theirs()
    inductor_config.post_grad_custom_pre_pass = theirs
    with pytest.warns(UserWarning, match=r"unshard of (weight|bias) runs unlowered.*install_passes"):
        step(model)
    assert theirs.seen == 2 and stages(records) == ["joint"]

    install_passes()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*unlowered.*")
        step(model)
    assert theirs.seen == 4 and stages(records) == ["joint", "joint", "forward", "backward"]


def test_installing_twice_installs_once() -> None:
    install_passes()
    before = (compat.get_post_grad_pass(), compat.get_joint_pass(), compat.get_scheduler_passes())
    install_passes()
    assert (compat.get_post_grad_pass(), compat.get_joint_pass(), compat.get_scheduler_passes()) == before
    assert isinstance(before[1], JointPass) and len(before[2]) == 1


def test_nothing_of_ours_runs_on_a_foreign_graph(records: list[GraphRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    install_passes()
    seen: list[bool] = []
    schedule = ScheduleInPlannedOrder.__call__

    def watch(self: ScheduleInPlannedOrder, snodes: list) -> list:  # type: ignore[type-arg]
        ordered = schedule(self, snodes)
        seen.append(ordered is snodes)
        return ordered

    monkeypatch.setattr(ScheduleInPlannedOrder, "__call__", watch)
    step(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert records == [] and seen == [True, True]


def test_a_user_scheduler_pass_is_kept_only_when_it_was_on() -> None:
    def theirs(snodes: list) -> list:  # type: ignore[type-arg]
        return snodes

    inductor_config.reorder_for_compute_comm_overlap_passes = [theirs]
    install_passes()
    assert [type(one) for one in compat.get_scheduler_passes()] == [ScheduleInPlannedOrder]

    inductor_config.reorder_for_compute_comm_overlap_passes = [theirs]
    inductor_config.reorder_for_compute_comm_overlap = True
    install_passes()
    assert compat.get_scheduler_passes()[0] is theirs and len(compat.get_scheduler_passes()) == 2


def test_a_deterministic_run_says_that_the_order_is_not_held() -> None:
    with (
        inductor_config.patch(deterministic=True),
        pytest.warns(UserWarning, match="deterministic.*order of collectives"),
    ):
        step(fully_shard(nn.Linear(8, 8)))


def test_backward_on_another_thread_finds_our_passes(records: list[GraphRecord]) -> None:
    """On CUDA, autograd runs backward, and so compiles it, on a thread of its own."""
    loss = torch.compile(fully_shard(nn.Linear(8, 8)), fullgraph=True)(torch.ones(2, 8)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert stages(records) == ["joint", "forward", "backward"]
