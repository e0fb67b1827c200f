"""The scripts in examples/, run as their first lines say: on two local processes, stopped and started again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("--dim", "64", "--layers", "1", "--length", "32", "--batch", "2")


def launched(script: str, *arguments: str, num_ranks: int = 2) -> str:
    """What a script printed."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    ran = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def saved(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint, whole, by name."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=str(folder), no_dist=True)
    return tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.more
def test_pre_training_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    """Bit by bit: the model and the optimizer's state; the first folder of three is gone then."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    printed = launched("pretrain.py", *SMALL, "--steps", "6", "--save-every", "2", "--out", str(once))
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([0-9.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0] < 6.0  # bytes by chance: log(256) = 5.5
    assert sorted(folder.name for folder in once.iterdir()) == ["step-4", "step-6"]

    shutil.copytree(once / "step-4", twice / "step-4")  # as if it had been stopped behind it
    launched("pretrain.py", *SMALL, "--steps", "6", "--save-every", "2", "--out", str(twice))
    expected = saved(once / "step-6")
    assert len(expected) > 20
    torch.testing.assert_close(saved(twice / "step-6"), expected, atol=0, rtol=0)
