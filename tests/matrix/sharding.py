"""Rows: how parameters lie on the ranks, and what of them is stored, gathered and computed with."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call

from fsdp_compile import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    fully_shard,
    replicate,
)
from tests.compiling import compile_blocks
from tests.matrix import models
from tests.matrix.meter import Meter
from tests.matrix.train import backward, compiled, optimizers, reference_backward, seed, step_all, train
from tests.models import mesh_of, shard, twins
from tests.test_extension import Halved


def plain(meter: Meter, block: type[nn.Module] = models.Even, **kwargs: Any) -> None:
    """The block and the root sharded, the whole model compiled."""
    reference, model = models.twins(block=block)
    shard(model, **kwargs)
    train(meter, model, reference, compiled(meter, model))


def block_by_block(meter: Meter) -> None:
    """Equal blocks compiled one by one share a graph; what is around them runs eagerly."""
    reference, model = models.twins(num_blocks=2)
    train(meter, model, reference, compile_blocks(shard(model), meter.backend))


# Meshes.


def replicated(meter: Meter) -> None:
    """Nothing is sharded, gradients are averaged."""
    reference, model = models.twins()
    for layer in model.layers:
        replicate(layer, offload_policy=OffloadPolicy())
    replicate(model)
    train(meter, model, reference, compiled(meter, model))


def whole_mesh(meter: Meter) -> None:
    """Parameters that are DTensors on the whole mesh, and dp_mesh_dims to say which dimension is data parallel."""
    mesh = mesh_of("dp", "tp")
    reference, model = twins(models.SpreadLoss)
    model.distribute(mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    place = mesh.get_local_rank("dp")
    train(meter, model, reference, compiled(meter, model), place=place, num_places=2, batches=models.features)


def expert_meshes(meter: Meter) -> None:
    """Some weights on a mesh of their own: averaged over two ranks, the others over four."""
    mesh = mesh_of("outer", "inner")
    reference, model = models.twins()
    experts = {fqn for fqn, _ in model.named_parameters() if ".up." in fqn or ".down." in fqn}
    params = {param for fqn, param in model.named_parameters() if fqn in experts}
    shard(model, shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), mesh["inner"]) if p in params else None)
    run = compiled(meter, model)
    first = 2 * mesh.get_local_rank("outer")
    own = copy.deepcopy(reference)  # trains on the batches of the inner ranks alone
    for step in range(2):
        tokens = models.batches(step)
        with meter.counting():
            backward(run, step, tokens)
        reference_backward(reference, tokens, step)
        for place in range(first, first + 2):
            seed(step, place)
            (own(tokens[place]) / 2).backward()
        for fqn in experts:
            reference.get_parameter(fqn).grad = own.get_parameter(fqn).grad
        meter.compare_gradients(model, reference)
        for one in (model, reference, own):
            one.zero_grad()
    meter.name_eager_modules(model)


def tensor_parallel(meter: Meter) -> None:
    """parallelize_module over one dimension of the mesh, then fully_shard over the other."""
    mesh = mesh_of("dp", "tp")
    reference, model = models.twins()
    for layer in model.layers:  # the norm sees half of the sequence, so its gradient is a partial sum
        cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        parallelize_module(layer.norm, mesh["tp"], cut)
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    shard(model, mesh=mesh["dp"])
    train(meter, model, reference, compiled(meter, model), place=mesh.get_local_rank("dp"), num_places=2)


def pipeline(meter: Meter) -> None:
    """Two compiled stages over two ranks each, 1F1B: the flag is set around backward, with two in flight."""
    mesh = mesh_of("pp", "dp")
    stage_rank, dp_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    reference = [models.Chunk() for _ in range(2)]
    chunk = copy.deepcopy(reference[stage_rank])
    for layer in chunk.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(chunk, mesh=mesh["dp"]).compile(backend=meter.backend, fullgraph=True)
    stage = PipelineStage(chunk, stage_rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, models.NUM_MICRO, loss_fn=models.mean_square)
    for step in range(3):
        inputs, targets = models.hidden_states(step)  # [dp, micro-batches, ...]
        with meter.counting(models.NUM_MICRO) if step == 2 else nullcontext():
            seed(step, dist.get_rank())
            if stage_rank == 0:
                schedule.step(inputs[dp_rank])
            else:
                schedule.step(target=targets[dp_rank])
        for place in range(2):
            hidden = inputs[place]
            for number, part in enumerate(reference):  # a stage's forwards run in the order of the micro-batches
                seed(step, 2 * number + place)
                hidden = torch.cat([part(one) for one in hidden.split(1)])
            (models.mean_square(hidden, targets[place]) / 2).backward()
        if step > 0:  # in the first step the schedule runs each stage once more, to see what it sends
            meter.compare_gradients(chunk, reference[stage_rank])
        for one in (chunk, *reference):
            one.zero_grad()
    meter.name_eager_modules(chunk)
    meter.notes.append("rank 0: the first stage, 4 micro-batches")


# What is stored, and what is gathered.


def lora(meter: Meter) -> None:
    """A frozen base, stored in bf16, and trainable adapters: only they are reduced."""
    reference, model = models.adapted(torch.float32), models.adapted(torch.bfloat16)
    for linear in models.frozen_linears(reference):
        linear.to(torch.bfloat16).to(torch.float32)
    shard(model)
    train(meter, model, reference, compiled(meter, model))
    num_adapters, seen = sum(param.requires_grad for param in model.parameters()), meter.wire.reductions
    expected = len(model.layers) if meter.backend == "inductor" else num_adapters
    meter.require(seen == expected, f"{seen} reductions for {num_adapters} adapters, not {expected}")


def subclass(meter: Meter) -> None:
    """A weight whose class says what is gathered: bf16 on the wire, fp32 in the shard."""
    reference, model = models.twins()
    layer, theirs = model.layers[0], reference.layers[0]
    layer.down.weight = nn.Parameter(Halved(layer.down.weight.detach()))
    with torch.no_grad():
        theirs.down.weight.copy_(theirs.down.weight.to(torch.bfloat16))
    shard(model)
    train(meter, model, reference, compiled(meter, model), lr=0.0)


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

    A compiler rounds to bf16 in other places than eager code does, so it compiles the reference as well. So both draw
    the random numbers that the backend draws by default: with other ones, dropout's zeros would be elsewhere.
    """
    reference, model = models.twins(Projector, models.Dropping)

    @functools.partial(torch.compile, backend=meter.backend, fullgraph=True)
    def in_bf16(tokens: Tensor, shift: Tensor) -> Tensor:
        halves = {fqn: param.to(torch.bfloat16) for fqn, param in reference.named_parameters()}
        return functional_call(reference, halves, (tokens, shift.to(torch.bfloat16)))

    block = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    root = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=block)
    run = compiled(meter, fully_shard(model, mp_policy=root))
    optims = optimizers(model, reference, lr=0.01)
    shift = torch.linspace(0, 1, models.DIM)
    for step in range(3):
        tokens = models.batches(step)
        seed(step, dist.get_rank())
        with meter.counting():
            loss = run(tokens[dist.get_rank()], shift)
            loss.backward()
        meter.require(loss.dtype is torch.float32, f"the output is {loss.dtype}")
        reference_backward(lambda batch: in_bf16(batch, shift).float(), tokens, step)  # the mean over the ranks in fp32
        dtypes = {param.grad.dtype for param in model.parameters()}
        meter.require(dtypes == {torch.float32}, f"gradients are {dtypes}")
        meter.compare_gradients(model, reference)
        step_all(optims)
