"""Rows: public functions around a compiled model."""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fsdp_compile
from tests.matrix import models
from tests.matrix.meter import Meter
from tests.matrix.train import backward, compiled, reference_backward, step_all, train
from tests.models import shard


def adopted(meter: Meter) -> None:
    """torch's name for fully_shard is ours inside the block."""
    reference, model = models.twins()
    with fsdp_compile.adopt() as adoption:
        for layer in model.layers:
            torch_fsdp.fully_shard(layer)
        torch_fsdp.fully_shard(model)
    assert isinstance(adoption, fsdp_compile.Adoption) and isinstance(model, fsdp_compile.FSDPModule)
    train(meter, model, reference, compiled(meter, model))


def resumed(meter: Meter) -> None:
    """A model of other values goes on from another's checkpoint, optimizer included."""
    reference, first = models.twins()
    torch.manual_seed(7)
    second = shard(models.Tiny())
    models_in_turn = (shard(first), second)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    for step, model in enumerate(models_in_turn):
        run = compiled(meter, model)
        ours = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        if step > 0:
            of_model, of_optim = get_state_dict(model, ours)
            reader = fsdp_compile.CheckedReader(str(folder[0]))
            dcp.load({"model": of_model, "optim": of_optim}, storage_reader=reader)
            set_state_dict(model, ours, model_state_dict=of_model, optim_state_dict=of_optim)
        with meter.counting():
            backward(run, step, models.batches(step))
        reference_backward(reference, models.batches(step), step)
        meter.compare_gradients(model, reference)
        step_all([ours, theirs])
        meter.compare_params(model, reference)
        if step == 0:
            of_model, of_optim = get_state_dict(run, ours)
            dcp.save({"model": of_model, "optim": of_optim}, checkpoint_id=str(folder[0]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))


def from_a_folder(meter: Meter) -> None:
    """Safetensors that another sharded model wrote, which says so by their names alone."""
    reference, first = models.twins()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    fsdp_compile.save_pretrained(shard(first), str(folder[0]), max_shard_size=2000)
    with torch.device("meta"):
        model = models.Tiny()
    fsdp_compile.load_pretrained(shard(model), str(folder[0]))
    meter.compare_params(model, reference)
    fsdp_compile.load_full_params(model, fsdp_compile.stream_full_params(first))
    meter.compare_params(model, reference)
    train(meter, model, reference, compiled(meter, model), num_steps=2)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(str(folder[0]))


def made_of_nothing(meter: Meter) -> None:
    """Sharded by class on the meta device, given the values of an unsharded model, clipped, looked at whole."""
    reference = models.Tiny()
    torch.manual_seed(3)
    for module in reference.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with torch.device("meta"):
        model = models.Tiny()
    fsdp_compile.auto_shard(model, models.Even)
    torch.manual_seed(3 if dist.get_rank() == 0 else 4)
    fsdp_compile.materialize(model)
    fsdp_compile.sync_module_states(fsdp_compile.cast_buffers(model, torch.float64))  # it has no buffers
    run = compiled(meter, model)
    train(meter, model, reference, run, num_steps=2)
    with meter.counting():
        backward(run, 2, models.batches(2))
    reference_backward(reference, models.batches(2), 2)
    norm = fsdp_compile.clip_grad_norm_(model, 0.1)
    meter.compare("norm", norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    meter.compare_gradients(model, reference)
    with fsdp_compile.full_params(model):
        for (name, full), expected in zip(model.named_parameters(), reference.parameters()):
            meter.compare(name, full.detach(), expected.detach())
