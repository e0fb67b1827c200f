"""examples/finetune_lora.py as its first lines say, beside PEFT and transformers on one process without sharding."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import LlamaForCausalLM

from tests.test_examples import launched, saved

LENGTH, ROWS = 32, 4  # of a step: two ranks have two each
SMALL = ("--length", str(LENGTH), "--batch", str(ROWS // 2), "--rank", "4")


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
@pytest.mark.more
def test_fine_tuning_goes_on_as_if_it_had_not_been_stopped_and_peft_reads_it(tmp_path: Path) -> None:
    """Losses as without sharding; adapters and optimizer as uninterrupted, bit by bit; no base weight in a checkpoint."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    launched("finetune_lora.py", *SMALL, "--steps", "0", "--out", str(once))
    reference = unsharded(once / "base", once / "adapters", trainable=True)
    first = {name: param.detach().clone() for name, param in reference.named_parameters() if param.requires_grad}
    assert len(first) == 2 * 7 * 2
    assert all((one == 0).all() == ("lora_B" in name) for name, one in first.items())

    printed = launched("finetune_lora.py", *SMALL, "--steps", "6", "--save-every", "2", "--out", str(once))
    found = [float(loss) for loss in re.findall(r"step \d: loss ([0-9.]+)", printed)]
    expected = losses_of(reference, 6)[1::2]
    assert len(set(found)) == 3
    assert found == pytest.approx(expected, abs=2e-3)

    shutil.copytree(once / "step-4", twice / "step-4")  # as if it had been stopped behind it
    launched("finetune_lora.py", *SMALL, "--model", str(once / "base"), "--steps", "6", "--out", str(twice))
    checkpoint = saved(once / "step-6")
    torch.testing.assert_close(saved(twice / "step-6"), checkpoint, atol=0, rtol=0)
    adapters = {name.removeprefix("adapters."): one for name, one in checkpoint.items() if name.startswith("adapters.")}
    assert set(adapters) == set(first)

    read = dict(unsharded(once / "base", once / "adapters").named_parameters())
    torch.testing.assert_close({name: read[name].detach() for name in adapters}, adapters, atol=0, rtol=0)
    assert all(not torch.equal(one, first[name]) for name, one in adapters.items())
