"""Our passes beside the user's: they compose, they leave foreign graphs alone, and being displaced is noticed."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

from fsdp_compile import fully_shard, install_passes
from fsdp_compile._torch_compat import inductor
from fsdp_compile.graph.install import ComposedPass, JointPass
from fsdp_compile.passes import GraphRecord, source_hash
from fsdp_compile.passes._torch_compat import CustomGraphPass
from tests.compiling import no_kernels_built
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
    settings = inductor_config.patch(post_grad_custom_pre_pass=None, fx_graph_cache=False)
    with settings, functorch_config.patch(enable_autograd_cache=False), no_kernels_built():
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


def test_passes_that_were_there_before_still_run(records: list[GraphRecord]) -> None:
    seen: list[fx.GraphModule] = []

    def their_joint_pass(module: fx.GraphModule, inputs: object) -> fx.GraphModule:
        seen.append(module)
        return module

    theirs = Theirs()
    inductor_config.post_grad_custom_pre_pass = theirs
    inductor.set_joint_pass(their_joint_pass)
    step(fully_shard(nn.Linear(8, 8)))
    assert theirs.seen == 2 and len(seen) == 1 and stages(records) == ["joint", "forward", "backward"]
    composed = inductor.get_post_grad_pass()
    assert isinstance(composed, ComposedPass) and composed.uuid() == ("theirs", f"{source_hash()}, over what is saved")


def test_a_pass_without_uuid_keeps_the_cache_off() -> None:
    inductor_config.post_grad_custom_pre_pass = Theirs(uuid=None)
    install_passes()
    assert not inductor.get_post_grad_pass().uuid()


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
    before = (inductor.get_post_grad_pass(), inductor.get_joint_pass())
    install_passes()
    assert (inductor.get_post_grad_pass(), inductor.get_joint_pass()) == before
    assert isinstance(before[1], JointPass)


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


def test_code_of_foreign_graphs_is_what_it_is_without_us_also_behind_one_of_ours(records: list[GraphRecord]) -> None:
    without_us = code_of_foreign_graphs()
    install_passes()
    assert code_of_foreign_graphs() == without_us
    assert records == []
    step(fully_shard(nn.Linear(8, 8)))
    assert code_of_foreign_graphs() == without_us
    assert stages(records) == ["joint", "forward", "backward"]


def test_backward_on_another_thread_finds_our_passes(records: list[GraphRecord]) -> None:
    """On CUDA, autograd runs backward, and so compiles it, on a thread of its own."""
    loss = torch.compile(fully_shard(nn.Linear(8, 8)), fullgraph=True)(torch.ones(2, 8)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert stages(records) == ["joint", "forward", "backward"]
