"""What the rows of `benchmarks.modes` share: how a model is sharded, compiled and trained beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import modes_models as models
from benchmarks.modes_meter import Meter
from fsdp_compile import fully_shard
from fsdp_compile.demo import Transformer

EAGER = "aot_eager"
"""The default backend of a row: graphs and passes as with inductor, without the minutes of generating code. Each
collective is that of one parameter; inductor's are in buckets."""
LR = 0.5

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    name: str
    run: Callable[[Meter], None]
    num_graphs: int | None = 1
    """At most so many; None where the number says nothing."""
    num_backwards: int | None = 1
    """At most so many compiled regions that backward enters in the step that is counted."""
    compiled_autograd: bool = False


def compiled(model: nn.Module, backend: str = EAGER, fullgraph: bool = True) -> Run:
    return torch.compile(model, backend=backend, fullgraph=fullgraph)


def shard(model: Transformer, **kwargs: Any) -> Transformer:
    """Each block, then the root."""
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def mesh_of(*dims: str) -> DeviceMesh:
    """Two ranks in each named dimension."""
    return init_device_mesh("cpu", (2,) * len(dims), mesh_dim_names=dims)


def reference_backward(reference: nn.Module, batches: Tensor) -> None:
    """Backward of the mean loss over the batches."""
    for batch in batches:
        (reference(batch) / len(batches)).backward()


def train(
    meter: Meter,
    model: nn.Module,
    reference: nn.Module,
    run: Run,
    *,
    place: int | None = None,
    num_places: int | None = None,
    batches: Callable[[int], Tensor] = models.batches,
    lr: float = LR,
) -> None:
    """Three steps of SGD on both. ``place`` is this rank's among those with a batch of their own: as a rule all."""
    place = dist.get_rank() if place is None else place
    optims = [torch.optim.SGD(one.parameters(), lr=lr) for one in (model, reference)]
    for step in range(3):
        tokens = batches(step)[:num_places]
        with meter.counting() if step == 2 else nullcontext():
            loss = run(tokens[place])
            if not meter.backward_inside:
                loss.backward()
        reference_backward(reference, tokens)
        meter.compare_gradients(model, reference)
        for optim in optims:
            optim.step()
            optim.zero_grad()
    meter.name_eager_modules(model)
