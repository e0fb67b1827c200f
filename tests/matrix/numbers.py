"""Rows: the dtypes in which a model computes, reduces and is scaled."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from tests.matrix import models
from tests.matrix.meter import Meter
from tests.matrix.train import LR, compiled, seed
from tests.models import shard


class Projector(models.Tiny):
    """Takes features beside tokens, which have a dtype to be cast."""

    def forward(self, tokens: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        x = x if shift is None else x + shift
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).pow(2).mean()


def mixed_precision(meter: Meter) -> None:
    """Compute in bf16, reduce in fp32, return fp32; inputs are cast.

    A compiler rounds to bf16 in other places than eager code does, so it compiles the reference as well.
    """
    reference, model = models.twins(Projector)

    @functools.partial(torch.compile, backend=meter.backend, fullgraph=True)
    def in_bf16(tokens: Tensor, shift: Tensor) -> Tensor:
        halves = {fqn: param.to(torch.bfloat16) for fqn, param in reference.named_parameters()}
        return functional_call(reference, halves, (tokens, shift.to(torch.bfloat16)))

    block = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    root = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=block)
    run = compiled(meter, fully_shard(model, mp_policy=root))
    optims = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, reference)]
    shift = torch.linspace(0, 1, models.DIM)
    for step in range(3):
        tokens = models.batches(step)
        seed(step, dist.get_rank())
        with meter.counting():
            loss = run(tokens[dist.get_rank()], shift)
            loss.backward()
        meter.require(loss.dtype is torch.float32, f"the output is {loss.dtype}")
        for place, batch in enumerate(tokens):  # as FSDP2 defines it; the mean over the ranks in fp32
            seed(step, place)
            (in_bf16(batch, shift).float() / len(tokens)).backward()
        dtypes = {param.grad.dtype for param in model.parameters()}
        meter.require(dtypes == {torch.float32}, f"gradients are {dtypes}")
        meter.compare_gradients(model, reference)
        for optim in optims:
            optim.step()
            optim.zero_grad()


def scaled(meter: Meter) -> None:
    """torch.amp.GradScaler and clipping around a compiled model; a gradient that overflows skips that step."""
    reference, model = models.twins()
    run = compiled(meter, shard(model))
    optims = [torch.optim.SGD(one.parameters(), lr=LR) for one in (model, reference)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in optims]
    for step in range(4):
        tokens = models.batches(step)
        overflow = float("inf") if step == 2 else 1.0
        ours, theirs = scalers
        with meter.counting():
            seed(step, dist.get_rank())
            (ours.scale(run(tokens[dist.get_rank()])) * overflow).backward()
        for place, batch in enumerate(tokens):
            seed(step, place)
            (theirs.scale(reference(batch)) * overflow / len(tokens)).backward()
        norms = []
        for one, scaler, optim in zip((model, reference), scalers, optims):
            scaler.unscale_(optim)
            norms.append(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01))
        if step != 2:
            meter.compare("norm", norms[0].full_tensor(), norms[1])
            meter.compare_gradients(model, reference)
        for scaler, optim in zip(scalers, optims):
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        meter.require(ours.get_scale() == theirs.get_scale(), f"scales {ours.get_scale()}, {theirs.get_scale()}")
    meter.require(ours.get_scale() == 4.0, "no step was skipped")
    meter.compare_params(model, reference)
