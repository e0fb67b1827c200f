"""Our passes beside the user's: they compose, they leave foreign graphs alone, and being displaced is noticed."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import fx, nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code

from fsdp_compile import fully_shard, install_passes
from fsdp_compile._torch_compat import inductor
from fsdp_compile.graph.install import AnchorToo, ComposedPass, JointPass
from fsdp_compile.passes import AnchorLaunches, GraphRecord, ScheduleInPlannedOrder, source_hash
from fsdp_compile.passes._torch_compat import CustomGraphPass
from fsdp_compile.passes._torch_compat_kernels import SchedulerPass
from tests.recording import recorded

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
    joint = inductor.get_joint_pass()
    with (
        inductor_config.patch(
            post_grad_custom_pre_pass=None,
            _pre_fusion_custom_pass=None,
            reorder_for_compute_comm_overlap=False,
            reorder_for_compute_comm_overlap_passes=[],
            fx_graph_cache=False,  # which a test may set otherwise
        ),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        inductor.set_joint_pass(None)
        yield
    inductor.set_joint_pass(joint)


@pytest.fixture
def records() -> Iterator[list[GraphRecord]]:
    with recorded() as seen:
        yield seen


def step(model: nn.Module) -> None:
    torch.compile(model, fullgraph=True)(torch.ones(2, 8)).sum().backward()


def stages(records: list[GraphRecord]) -> list[str]:
    return [record.stage for record in records]


def test_a_pass_that_was_there_before_still_runs(records: list[GraphRecord]) -> None:
    theirs = Theirs()
    inductor_config.post_grad_custom_pre_pass = theirs
    step(fully_shard(nn.Linear(8, 8)))
    assert theirs.seen == 2 and stages(records) == ["joint", "forward", "backward"]
    composed = inductor.get_post_grad_pass()
    assert isinstance(composed, ComposedPass) and composed.uuid() == ("theirs", source_hash())


def test_a_pass_without_uuid_keeps_the_cache_off() -> None:
    inductor_config.post_grad_custom_pre_pass = Theirs(uuid=None)
    install_passes()
    assert not inductor.get_post_grad_pass().uuid()


def test_a_joint_pass_that_was_there_before_still_runs(records: list[GraphRecord]) -> None:
    seen: list[fx.GraphModule] = []

    def theirs(module: fx.GraphModule, inputs: object) -> fx.GraphModule:
        seen.append(module)
        return module

    inductor.set_joint_pass(theirs)
    step(fully_shard(nn.Linear(8, 8)))
    assert len(seen) == 1 and stages(records)[0] == "joint"


def test_a_pass_before_fusion_that_was_there_before_still_runs() -> None:
    seen: list[int] = []
    inductor_config._pre_fusion_custom_pass = lambda snodes: [seen.append(len(snodes)), snodes][1]
    anchored = mock.Mock(side_effect=lambda snodes: snodes)
    with mock.patch.object(AnchorLaunches, "__call__", anchored):
        step(fully_shard(nn.Linear(8, 8)))
    assert len(seen) == 2 and all(seen) and anchored.call_count == 2
    install_passes()
    assert isinstance(inductor.get_pre_fusion_pass(), AnchorToo)
    assert not isinstance(inductor.get_pre_fusion_pass().theirs, AnchorToo)
    assert copy.deepcopy(inductor.get_pre_fusion_pass()) is inductor.get_pre_fusion_pass()  # as other threads' settings


class BeforeFusion(SchedulerPass):
    """One that Inductor caches graphs with."""

    def __call__(self, snodes: list[Any]) -> list[Any]:
        return snodes

    def uuid(self) -> str:
        return "before fusion, as the user has it"


def test_graphs_are_cached_by_a_pass_before_fusion_and_ours() -> None:
    theirs = BeforeFusion()
    inductor_config._pre_fusion_custom_pass = theirs
    install_passes()
    both = inductor.get_pre_fusion_pass()
    assert isinstance(both, SchedulerPass) and both.uuid() == (theirs.uuid(), source_hash())
    torch._dynamo.utils.counters.clear()
    with inductor_config.patch(fx_graph_cache=True):
        step(fully_shard(nn.Linear(8, 8)))
    counted = torch._dynamo.utils.counters["inductor"]
    assert counted["fxgraph_cache_miss"] + counted["fxgraph_cache_hit"] == 2 and not counted["fxgraph_cache_bypass"]

    inductor_config._pre_fusion_custom_pass = lambda snodes: snodes
    install_passes()
    assert not isinstance(inductor.get_pre_fusion_pass(), SchedulerPass)


def test_a_pass_before_fusion_that_replaces_ours_warns() -> None:
    model = fully_shard(nn.Linear(8, 8))
    inductor_config._pre_fusion_custom_pass = BeforeFusion()
    with pytest.warns(UserWarning, match=r"_pre_fusion_custom_pass was set after fully_shard.*(forward|backward) graph") as warned:
        step(model)
    assert "backward graph" in str(warned[-1].message)
    torch._dynamo.reset()
    install_passes()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*_pre_fusion_custom_pass.*")
        step(model)


def test_a_displaced_pass_warns_and_the_numbers_stay(records: list[GraphRecord]) -> None:
    model = fully_shard(nn.Linear(8, 8))
    theirs = Theirs()
    inductor_config.post_grad_custom_pre_pass = theirs
    with pytest.warns(UserWarning, match=r"(unshard|reduce_grad) of (weight|bias) runs unlowered.*install_passes") as warned:
        step(model)
    assert str(warned[0].message).startswith("unshard")
    assert theirs.seen == 2 and stages(records) == ["joint"]

    install_passes()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*unlowered.*")
        step(model)
    assert theirs.seen == 4 and stages(records) == ["joint", "joint", "forward", "backward"]


def test_installing_twice_installs_once() -> None:
    install_passes()
    before = (inductor.get_post_grad_pass(), inductor.get_joint_pass(), inductor.get_scheduler_passes(ScheduleInPlannedOrder))
    install_passes()
    assert (inductor.get_post_grad_pass(), inductor.get_joint_pass(), inductor.get_scheduler_passes(ScheduleInPlannedOrder)) == before
    assert isinstance(before[1], JointPass) and len(before[2]) == 1


def foreign(x: torch.Tensor) -> torch.Tensor:
    """An all-reduce of what would be fused with something else, and slices that change nothing."""
    doubled = x * 2
    summed = torch.ops._c10d_functional.all_reduce(doubled + 1, "sum", dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(summed)[0:] + doubled.sin()[:, 0:8] + x[0 : x.shape[0]]


def code_of_foreign_graphs() -> list[str]:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    _, trained = run_and_get_code(lambda: torch.compile(model)(torch.ones(2, 8)).sum().backward())
    _, reduced = run_and_get_code(torch.compile(foreign), torch.ones(2, 8))
    assert len(trained) == 2 and len(reduced) == 1
    # AOTAutograd numbers its graphs.
    return [re.sub(r"# AOT ID: .*", "", code) for code in [*trained, *reduced]]


def test_code_of_foreign_graphs_is_what_it_is_without_us(
    records: list[GraphRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_us = code_of_foreign_graphs()
    install_passes()
    called: list[bool] = []
    monkeypatch.setattr(ScheduleInPlannedOrder, "__call__", lambda self, snodes: called.append(True) or snodes)
    assert code_of_foreign_graphs() == without_us
    assert records == [] and called == []


def test_a_foreign_graph_behind_one_of_ours_is_as_it_was(records: list[GraphRecord]) -> None:
    without_us = code_of_foreign_graphs()
    step(fully_shard(nn.Linear(8, 8)))
    assert not inductor_config.reorder_for_compute_comm_overlap
    assert code_of_foreign_graphs() == without_us
    assert stages(records) == ["joint", "forward", "backward"]


def test_a_graph_of_ours_that_fails_leaves_foreign_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_us = code_of_foreign_graphs()
    model = fully_shard(nn.Linear(8, 8))
    with monkeypatch.context() as patch:
        patch.setattr(GraphLowering, "run", mock.Mock(side_effect=KeyError("lowering")))
        with pytest.raises(Exception, match="lowering"):
            step(model)
    assert code_of_foreign_graphs() == without_us


def test_a_user_scheduler_pass_is_kept_only_when_it_was_on() -> None:
    def theirs(snodes: list) -> list:  # type: ignore[type-arg]
        return snodes

    inductor_config.reorder_for_compute_comm_overlap_passes = [theirs]
    install_passes()
    assert [type(one) for one in inductor.get_scheduler_passes(ScheduleInPlannedOrder)] == [ScheduleInPlannedOrder]
    assert not inductor_config.reorder_for_compute_comm_overlap

    inductor_config.reorder_for_compute_comm_overlap_passes = [theirs]
    inductor_config.reorder_for_compute_comm_overlap = True
    install_passes()
    assert inductor.get_scheduler_passes(ScheduleInPlannedOrder)[0] is theirs and len(inductor.get_scheduler_passes(ScheduleInPlannedOrder)) == 2


def test_a_deterministic_run_says_that_the_order_is_not_held() -> None:
    with (
        inductor_config.patch(deterministic=True),
        pytest.warns(UserWarning, match="deterministic.*order of collectives"),
    ):
        step(fully_shard(nn.Linear(8, 8)))


def test_a_displaced_scheduler_pass_is_said_to_be() -> None:
    model = fully_shard(nn.Linear(8, 8))
    inductor_config.reorder_for_compute_comm_overlap_passes = []
    with pytest.warns(UserWarning, match="reorder_for_compute_comm_overlap_passes was set after.*order of collectives"):
        step(model)


def test_backward_on_another_thread_finds_our_passes(records: list[GraphRecord]) -> None:
    """On CUDA, autograd runs backward, and so compiles it, on a thread of its own."""
    loss = torch.compile(fully_shard(nn.Linear(8, 8)), fullgraph=True)(torch.ones(2, 8)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert stages(records) == ["joint", "forward", "backward"]
