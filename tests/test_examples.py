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
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import functional
from transformers import LlamaForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"
LENGTH, ROWS = 32, 4  # of a step: two ranks have two each
SMALL_LORA = ("--length", str(LENGTH), "--batch", str(ROWS // 2), "--rank", "4")
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


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d: loss ([0-9.]+)", printed)]


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
@pytest.mark.slow
def test_pre_training_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    """Bit by bit: the model and the optimizer's state; the first folder of three is gone then."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    printed = launched("pretrain.py", *SMALL, "--steps", "6", "--save-every", "2", "--out", str(once))
    losses = losses_in(printed)
    assert len(losses) == 3 and losses[-1] < losses[0] < 6.0  # bytes by chance: log(256) = 5.5
    assert sorted(folder.name for folder in once.iterdir()) == ["step-4", "step-6"]

    shutil.copytree(once / "step-4", twice / "step-4")  # as if it had been stopped behind it
    launched("pretrain.py", *SMALL, "--steps", "6", "--save-every", "2", "--out", str(twice))
    expected = saved(once / "step-6")
    assert len(expected) > 20
    torch.testing.assert_close(saved(twice / "step-6"), expected, atol=0, rtol=0)


def unsharded(base: Path, adapters: Path, trainable: bool = False) -> PeftModel:
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(adapters), is_trainable=trainable)


def losses_of(model: PeftModel, num_steps: int) -> list[float]:
    """Of the script's batches, with the optimizer that it says it has."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))
    params = [param for param in model.parameters() if param.requires_grad]
    optim = torch.optim.AdamW(params, lr=5e-3, weight_decay=0.0)
    losses = []
    for step in range(num_steps):
        starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=torch.Generator().manual_seed(step))
        tokens = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")  # a load by one process
@pytest.mark.slow
def test_fine_tuning_goes_on_as_if_it_had_not_been_stopped_and_peft_reads_it(tmp_path: Path) -> None:
    """Losses as without sharding; adapters and optimizer as uninterrupted, bit by bit; no base weight in a checkpoint."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    launched("finetune_lora.py", *SMALL_LORA, "--steps", "0", "--out", str(once))
    reference = unsharded(once / "base", once / "adapters", trainable=True)
    first = {name: param.detach().clone() for name, param in reference.named_parameters() if param.requires_grad}
    assert len(first) == 2 * 7 * 2
    assert all((one == 0).all() == ("lora_B" in name) for name, one in first.items())

    printed = launched("finetune_lora.py", *SMALL_LORA, "--steps", "6", "--save-every", "2", "--out", str(once))
    found = losses_in(printed)
    expected = losses_of(reference, 6)[1::2]
    assert len(set(found)) == 3
    assert found == pytest.approx(expected, abs=2e-3)

    shutil.copytree(once / "step-4", twice / "step-4")  # as if it had been stopped behind it
    launched("finetune_lora.py", *SMALL_LORA, "--model", str(once / "base"), "--steps", "6", "--out", str(twice))
    checkpoint = saved(once / "step-6")
    torch.testing.assert_close(saved(twice / "step-6"), checkpoint, atol=0, rtol=0)
    adapters = {name.removeprefix("adapters."): one for name, one in checkpoint.items() if name.startswith("adapters.")}
    assert set(adapters) == set(first)

    read = dict(unsharded(once / "base", once / "adapters").named_parameters())
    torch.testing.assert_close({name: read[name].detach() for name in adapters}, adapters, atol=0, rtol=0)
    assert all(not torch.equal(one, first[name]) for name, one in adapters.items())


@pytest.mark.slow
def test_the_generator_has_the_weights_that_the_policy_has_in_each_round() -> None:
    printed = launched("rl_loop.py", num_ranks=3)
    differences = [float(found) for found in re.findall(r"differ by ([0-9.e+-]+)", printed)]
    assert len(differences) == 3 and max(differences) < 1e-4, printed
