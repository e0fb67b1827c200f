"""What compiling says of itself: a line a graph, what FSDP_COMPILE_LOGS names, and artifacts in torch's trace."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from fsdp_compile import fully_shard
from fsdp_compile._torch_compat import inductor
from fsdp_compile.graph.install import manager
from fsdp_compile.passes import JOINT_PASSES
from fsdp_compile.tools import logs
from tests.compiling import no_kernels_built

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


@pytest.fixture
def start(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """``start_logging``; all that it changes is taken back."""
    logger = logs.logger
    before = logger.level, logger.propagate, list(logger.handlers), list(manager.listeners)
    manager.listeners.clear()
    yield logs.start_logging
    logger.setLevel(before[0])
    logger.propagate = before[1]
    logger.handlers[:] = before[2]
    manager.listeners[:] = before[3]


def step() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with inductor.no_compile_caches(), no_kernels_built():
        torch.compile(model)(torch.ones(2, 8)).sum().backward()


def test_a_line_a_graph_at_info(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    start("")
    with caplog.at_level(logging.INFO, logger="fsdp_compile"):
        step()
    lines = [record.getMessage() for record in caplog.records if record.name == "fsdp_compile"]
    said = {line.split(":")[0].rpartition("_")[2]: line for line in lines}
    assert list(said) == ["joint", "forward", "backward"] and len(lines) == 3
    # Four ranks, one row of eight and its bias padded: 2 x (64 + 8) / 4 elements of 4 bytes a rank in forward.
    assert "[rank 0] fsdp_compile" in said["forward"] and "2 gathers of 144 B" in said["forward"]
    assert "0 gathers of 0 B" not in said["backward"] and "2 reductions of 144 B a rank" in said["backward"]
    assert "4 parameters gathered again in backward, 0 kept" in said["joint"]
    assert all("\n" not in line for line in lines)


def test_what_is_named_stands_below_the_line(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    start("plan, passes,graph")
    step()
    printed = capfd.readouterr().err
    assert "in backward" in printed and "its unit is gathered again" in printed  # the joint graph's table
    assert "longer than the compute beside it" in printed  # the forward graph's
    assert "pass      did" in printed and "overlap" in printed
    assert "torch.ops.fsdpc.all_gather_members" in printed  # code


def test_nobody_who_listens_costs_no_copies_of_graphs(start: Any) -> None:
    log = start("passes")
    assert not log.wants_graphs()
    records = []
    manager.listeners[-1] = type(manager.listeners[-1])(records.append, log.wants_graphs)
    step()
    assert records and all(record.graph is None and not record.snapshots for record in records)


def test_a_name_that_is_nothing_to_log_warns(start: Any) -> None:
    with pytest.warns(UserWarning, match=r"FSDP_COMPILE_LOGS says plans, which is nothing to log: it takes plan, passes, graph"):
        start("plans")


_TRACED = """
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
import fsdp_compile
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
model = fsdp_compile.fully_shard(nn.Linear(8, 8))
torch.compile(model, backend="inductor")(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_trace_has_plans_and_code(tmp_path: Path) -> None:
    """In the frame that compiles, which is where tlparse lists artifacts; the same after the settings say FSDP_COMPILE_LOGS."""
    env = {**os.environ, "TORCH_TRACE": str(tmp_path), "FSDP_COMPILE_LOGS": "passes"}
    ran = subprocess.run([sys.executable, "-c", _TRACED], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "fsdp_compile 01_forward: 1 gather of 72 B" in ran.stderr and "insert" in ran.stderr
    found: dict[str, str] = {}
    for file in tmp_path.iterdir():
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            entry = line.partition("] ")[2]
            if entry.startswith("{") and "artifact" in (about := json.loads(entry)):
                name = about["artifact"]["name"]
                if name.startswith("fsdp_compile_"):
                    assert about["frame_id"] == 0
                    payload = takewhile(lambda one: one.startswith("\t"), lines[number + 1 :])
                    found[name] = "\n".join(one[1:] for one in payload)
    plan = json.loads(found["fsdp_compile_forward_plan"])
    assert plan["gathers"][0]["fqns"] == ["weight", "bias"]
    assert "all_gather" not in found["fsdp_compile_forward_0_captured"]
    assert "all_gather_members" in found["fsdp_compile_forward_1_insert"]
    assert f"fsdp_compile_joint_{len(JOINT_PASSES)}_keep" in found and "fsdp_compile_backward_table" in found


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 12), reason="torch 2.11 asserts that leaves are no DTensors")
def test_a_whole_steps_graph_is_predicted(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    start("plan")
    torch._dynamo.reset()
    model = fully_shard(nn.Linear(8, 8))

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True), inductor.no_compile_caches(), no_kernels_built():
        torch.compile(train, fullgraph=True)(torch.ones(4, 8))
    printed = capfd.readouterr().err
    assert "_whole: " in printed and "not predicted" not in printed
