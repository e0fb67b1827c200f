"""What is measured of a row: what the process group was asked for, the graphs, the largest difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.worker import plain_name
from fsdp_compile._torch_compat import dtensors, dynamo
from fsdp_compile.eager import forward as eager
from tests.recording import let_threads_rest

_BACKWARD = "autograd::engine::evaluate_function"
_REGION = "Torch-Compiled Region: "
_COMPILED_BACKWARDS = (f"{_BACKWARD}: CompiledFunctionBackward", f"{_REGION}!")  # the second: compiled autograd's
_KINDS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
_WRAPPER = "_checkpoint_wrapped_module."
_FP32_BYTES = 4  # everything that is reduced where bytes are shown


@dataclass
class Wire:
    """What one rank asked its process groups for, by kind, whoever asked: graphs, or hooks that ran eagerly."""

    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    reduced_bytes: int = 0
    num_backwards: int = 0  # compiled regions that backward entered: one, where it is one graph

    @property
    def reductions(self) -> int:
        return sum(count for kind, count in self.backward.items() if kind != "all_gather")


class Meter:
    """Collects one row."""

    def __init__(self, backend: str, backward_inside: bool = False) -> None:
        self.backend = backend
        self.backward_inside = backward_inside  # the compiled step runs backward itself
        self.wire = Wire()
        self.difference = -1.0  # nothing was compared yet
        self.where = ""
        self.of = "gradients"
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._eager: set[nn.Module] = set()

    # --- the numbers

    def compare_gradients(self, model: nn.Module, reference: nn.Module) -> None:
        """Of each parameter: the largest difference, over the reference's largest gradient of that parameter."""
        ours = {fqn.replace(_WRAPPER, ""): param for fqn, param in model.named_parameters()}
        theirs = dict(reference.named_parameters())
        self.require(list(ours) == list(theirs), "the parameters have other names than the reference's")
        for fqn, param in theirs.items():
            grad = ours[fqn].grad
            if param.grad is None or grad is None:
                self.require(param.grad is grad, f"{fqn} has a gradient on one side alone")
                continue
            self.compare(fqn, grad, param.grad)

    def compare_updates(
        self, model: nn.Module, reference: nn.Module, before: list[Tensor], reference_before: list[Tensor]
    ) -> None:
        """The same for what a step changed, where the optimizer left no gradient to look at."""
        self.of = "updates"
        params = zip(model.named_parameters(), before, reference.parameters(), reference_before)
        for (fqn, ours), was, theirs, theirs_was in params:
            self.compare(fqn, ours.detach() - was, theirs.detach() - theirs_was)

    def compare_params(self, model: nn.Module, reference: nn.Module) -> None:
        """What the optimizers made of the parameters themselves."""
        for (fqn, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            self.compare(fqn, ours.detach(), theirs.detach())

    def compare(self, name: str, ours: Tensor, expected: Tensor) -> None:
        """Each rank compares its own part, so that comparing communicates nothing."""
        part = part_of(expected, ours.placements, ours.device_mesh) if isinstance(ours, DTensor) else expected
        local = ours.to_local() if isinstance(ours, DTensor) else ours
        if local.shape != part.shape:
            raise AssertionError(f"{name}: this rank has {tuple(local.shape)}, and should have {tuple(part.shape)}")
        largest = expected.abs().max().item()
        off = (local - part).abs().max().item() if part.numel() else 0.0
        relative = off / largest if largest else off
        if not relative <= self.difference:
            self.difference, self.where = (relative if math.isfinite(relative) else math.inf), name

    def require(self, condition: bool, otherwise: str) -> None:
        if not condition and otherwise not in self.problems:
            self.problems.append(otherwise)

    # --- what ran

    @contextmanager
    def counting(self, num_forwards: int = 1) -> Iterator[Wire]:
        """Count the collectives of what runs inside; the last block's stand in the table.

        What is launched from the first node of a backward on belongs to backward, where there are several forwards
        until the next compiled one begins. The profiler sees the calls themselves, from graphs and from hooks alike,
        and nothing is compiled again for it.
        """
        self.wire = wire = Wire()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            yield wire
            let_threads_rest()
        backward_until = -math.inf
        calls = wire.forward
        for event in sorted(profile.events() or (), key=lambda event: event.time_range.start):
            name, begin = event.name, event.time_range.start
            if name.startswith(_COMPILED_BACKWARDS):
                wire.num_backwards += 1
            if name.startswith((_BACKWARD, f"{_REGION}!")):
                calls, backward_until = wire.backward, max(backward_until, event.time_range.end)
            elif num_forwards > 1 and name.startswith(_REGION) and begin > backward_until:
                calls = wire.forward
            kind = plain_name(name.removeprefix("c10d::")) if name.startswith("c10d::") else ""
            if kind in _KINDS:
                calls[kind] += 1
                if kind != "all_gather":
                    shapes = [shape for shape in event.input_shapes if shape]
                    wire.reduced_bytes += _FP32_BYTES * max(map(math.prod, shapes), default=0)

    @contextmanager
    def watching_reads(self) -> Iterator[None]:
        """Note the modules whose parameters are read outside of any graph."""

        def observe(module: nn.Module, name: str) -> None:
            self._eager.add(module)

        eager.read_observers.append(observe)
        try:
            yield
        finally:
            eager.read_observers.remove(observe)

    def name_eager_modules(self, model: nn.Module) -> None:
        """Say which modules of ``model`` those were, by the outermost that says it all."""
        paths = [path for path, module in model.named_modules() if module in self._eager]
        units = sorted({".".join(path.split(".")[:2]) or "(root)" for path in paths})
        if units:
            self.notes.append(f"eager: {', '.join(units)}")

    def result(self) -> dict[str, Any]:
        return {
            "num_graphs": dynamo.num_dynamo_graphs(),
            "num_backwards": self.wire.num_backwards,
            "forward": dict(self.wire.forward),
            "backward": dict(self.wire.backward),
            "reduced_bytes": self.wire.reduced_bytes,
            "difference": self.difference,
            "where": self.where,
            "of": self.of,
            "notes": self.notes,
            "problems": self.problems,
        }


def part_of(whole: Tensor, placements: Iterable[Any], mesh: DeviceMesh) -> Tensor:
    """This rank's part of a whole tensor, without communication; strided placements cut what the others left."""
    dims = list(enumerate(placements))
    for dim, placement in sorted(dims, key=lambda one: isinstance(one[1], dtensors.StridedShard)):
        if isinstance(placement, (Shard, dtensors.StridedShard)):
            chunks = torch.chunk(whole, mesh.size(dim), placement.dim)
            place = mesh.get_local_rank(dim)
            whole = chunks[place] if place < len(chunks) else chunks[0].narrow(placement.dim, 0, 0)
    return whole


def describe(calls: dict[str, int]) -> str:
    return ", ".join(f"{calls[kind]} {kind}" for kind in _KINDS if calls.get(kind)) or "none"
