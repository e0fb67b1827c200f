"""Offloaded shards in compiled code, as far as a CPU shows it: the same markers, passes, ops and waits as for a GPU.

On a CPU nothing is copied, so ``shards_elsewhere`` gives another answer to one question: do a unit's shards have to be
copied to where they are gathered? What is copied back without waiting then arrives when it is waited for, and is NaN
until then: that is what a copy to pinned memory may look like. The true answer to that question, and what follows from
it in a graph, stand in the tests on two devices (``meta`` is one of them), and with real copies in tests/test_gpu.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode

import fsdp_compile
from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp_compile.api.classes import refresh
from fsdp_compile.core.accumulation import Held
from fsdp_compile.core.unit import Unit, units_in
from fsdp_compile.passes.ir import markers
from fsdp_compile.passes.ir.markers import spec_in
from fsdp_compile.passes.ir.provenance import unshard_nodes
from tests.comparing import (
    assert_same_grads,
    backward_on_both,
    full,
    local_loss,
    loss_of,
    mine,
    train_and_compare,
)
from tests.compiling import compiled
from tests.models import Stack, mesh_of, pair, shard
from tests.on_ranks import on_four_ranks, on_two_ranks
from tests.recording import recorded
from tests.test_extension import InEights
from tests.test_passes import spec

OFFLOAD = CPUOffloadPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def shards_elsewhere() -> Iterator[Counter[str]]:
    """Counts the copies; leaves no way to read one too early."""
    counts: Counter[str] = Counter()
    on_the_way: dict[int, tuple[Tensor, Tensor]] = {}

    def to_device(shard: Tensor, device: str) -> Tensor:
        counts["to_device"] += 1
        return shard.clone()

    def to_host(reduced: Tensor, pinned: bool, wait: bool = True) -> Tensor:
        counts["to_host"] += 1
        if wait:
            counts["waits"] += 1
            return reduced.clone()
        copy = torch.full_like(reduced, torch.nan)
        on_the_way[copy.data_ptr()] = copy, reduced.clone()
        return copy

    def wait_for_copies(copies: list[Tensor], device: str) -> None:
        counts["waits"] += 1
        assert len(copies) == len(on_the_way)
        for one in copies:
            copy, source = on_the_way.pop(one.data_ptr())
            copy.copy_(source)

    library = torch.library.Library("fsdpc", "IMPL")
    for op in (to_device, to_host, wait_for_copies):
        library.impl(op.__name__, op, "CPU")
    try:
        with patch.object(Unit, "computes_elsewhere", property(lambda unit: unit.offload)):
            yield counts
        assert not on_the_way
    finally:
        library._destroy()


@contextmanager
def nothing_runs_eagerly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*eagerly.*")
        yield


def offloaded(make: Callable[[], Stack] = Stack, **options: Any) -> tuple[Stack, Stack]:
    return pair(make=make, offload_policy=OFFLOAD, **options)


def _small() -> Stack:
    return Stack(1)


def _tied_and_uneven() -> Stack:
    return Stack(2, dim=17, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "make", "options"),
    [
        ("aot_eager", _small, {}),
        pytest.param("passes", _small, {"reshard_after_forward": True}, marks=pytest.mark.compat),
        ("passes", _tied_and_uneven, {"reshard_after_forward": False}),
    ],
)
@on_two_ranks
def test_trains_like_the_unsharded_model(backend: str, make: Callable[[], Stack], options: dict[str, Any]) -> None:
    with shards_elsewhere() as counts, nothing_runs_eagerly():
        unsharded, model = offloaded(make, **options)
        run = compiled(model, backend)
        train_and_compare(run, model, unsharded)
        counts.clear()
        local_loss(run, 0).backward()
    if backend == "passes":
        assert counts["waits"] == 1  # for the whole backward
        assert counts["to_host"] < counts["to_device"]  # one a bucket; each shard is copied by itself
    else:
        assert counts["waits"] == counts["to_host"] > 1


def _in_micro_batches(model: Stack, run: Any, step: int) -> None:
    """Held back and reduced, added to gradients that are there, and reduced or not as is said behind forward."""
    for micro in range(4):
        model.set_requires_gradient_sync(micro >= 2)
        local_loss(run, 6 * step + micro).backward()
    losses = [local_loss(run, 6 * step + micro) for micro in (4, 5)]
    for micro, loss in enumerate(losses):
        model.set_requires_gradient_sync(micro == 1)
        loss.backward()


def _evaluated_and_partly_frozen(model: Stack, run: Any, step: int) -> None:
    with torch.no_grad():
        run(mine(step))
    model.layers[0].up.weight.requires_grad_(step == 0)
    local_loss(run, step).backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drive", "backend", "options"),
    [
        (_in_micro_batches, "aot_eager", {}),
        (_in_micro_batches, "passes", {"mp_policy": BF16}),
        (_evaluated_and_partly_frozen, "passes", {}),
    ],
)
@on_two_ranks
def test_the_numbers_are_those_of_resident_shards(drive: Any, backend: str, options: dict[str, Any]) -> None:
    """Three steps offloaded and three not, with the same collectives: the gradients are the same numbers."""
    grads = []
    for policy in (OFFLOAD, fsdp_compile.OffloadPolicy()):
        with shards_elsewhere() as counts, nothing_runs_eagerly():
            torch.manual_seed(0)
            model = shard(_small(), offload_policy=policy, **options)
            run = compiled(model, backend)
            optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
            seen = []
            for step in range(3):
                drive(model, run, step)
                seen += [full(param.grad).clone() for param in model.parameters() if param.grad is not None]
                optim.step()
                optim.zero_grad()
            grads.append(seen)
            assert bool(counts) == (policy is OFFLOAD)
    assert len(grads[0]) == len(grads[1]) > 0
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
@on_four_ranks
def test_replicas_and_slices() -> None:
    """Sums over the shards alone wait on the device for the one over replicas."""
    with shards_elsewhere(), nothing_runs_eagerly():
        unsharded, model = offloaded(_small, mesh=mesh_of("replicate", "shard"))
        run = compiled(model, "passes")
        for step in range(2):
            for micro in range(2):
                model.set_requires_all_reduce(micro == 1)
                backward_on_both(run, unsharded, 2 * step + micro)
            assert_same_grads(model, unsharded)
        unsharded, model = offloaded(_small, reshard_after_forward=2)
        train_and_compare(compiled(model, "passes"), model, unsharded, steps=2)


@pytest.mark.slow
@on_two_ranks
def test_whoever_reads_a_gradient_at_once_finds_it_complete() -> None:
    """Who reads a gradient at once finds all of it: hooks, an optimizer in backward, ``autograd.grad``."""
    with shards_elsewhere(), nothing_runs_eagerly():
        unsharded, model = offloaded(_small)
        run = compiled(model, "passes")
        seen: dict[str, Tensor] = {}
        for fqn, param in model.named_parameters():
            if param.ndim == 1:
                param.register_post_accumulate_grad_hook(lambda param, fqn=fqn: seen.update({fqn: full(param.grad)}))
            else:
                param.register_hook(lambda grad, fqn=fqn: seen.update({fqn: full(grad)}))
        backward_on_both(run, unsharded, 0)
        assert_same_grads(model, unsharded)
        expected = {fqn: param.grad for fqn, param in unsharded.named_parameters()}
        assert seen.keys() == expected.keys()
        asked = dict(zip(expected, torch.autograd.grad(local_loss(run, 0), list(model.parameters()))))
        for fqn, grad in expected.items():
            torch.testing.assert_close(seen[fqn], grad, atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(full(asked[fqn]), grad, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@on_two_ranks
def test_with_an_extension_the_unit_runs_eagerly_and_says_so() -> None:
    with shards_elsewhere():
        torch.manual_seed(0)
        model = Stack(2)
        model.layers[1].down.weight = nn.Parameter(InEights(model.layers[1].down.weight.detach()))
        shard(model, offload_policy=OFFLOAD)
        with pytest.warns(UserWarning, match=r"layers.1 .* CPUOffloadPolicy with the all-gather extension of down.weight"):
            loss_of(torch.compile(model, backend="aot_eager")(mine(0))).backward()
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.compat
def test_only_full_parameters_and_their_gradients_are_on_the_device() -> None:
    """A joint graph over two devices, cut by the partitioner: ``meta`` takes the GPU's part."""
    graphs = {}

    def keep(stage: str) -> Any:
        def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs[stage] = {node.name: node.meta["val"] for node in module.graph.nodes if node.op != "output"}
            return module

        return make_boxed_compiler(compiler)

    its_spec = spec(device="meta", dtype=torch.bfloat16).text

    def product(x: Tensor, shard: Tensor, edge: Tensor) -> Tensor:
        return torch.mm(x, markers.unshard(shard, edge, None, "reduce", spec=its_spec))

    with FakeTensorMode():
        x = torch.empty(5, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
        shard, edge = torch.empty(2, 3), torch.zeros(()).expand(2, 3).requires_grad_()
        run: Any = aot_function(product, keep("forward"), keep("backward"), min_cut_rematerialization_partition)
        run(x, shard, edge).sum().backward()
        assert (edge.grad.device.type, edge.grad.dtype, tuple(edge.grad.shape)) == ("cpu", torch.float32, (2, 3))
    on_cpu = {stage: {name for name, value in graph.items() if value.device.type == "cpu"} for stage, graph in graphs.items()}
    assert on_cpu["forward"] == {"primals_2", "primals_3"}
    assert "reduce_grad" in on_cpu["backward"]


def on_mesh_of(device: str, model: nn.Module) -> nn.Module:
    """The sharded model as if its mesh were of that device."""
    for unit in units_in(model):
        unit.mesh = dataclasses.replace(unit.mesh, device=torch.device(device))
        refresh(unit)
    return model


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize(
    ("policy", "mesh", "copied_to"),
    [(OFFLOAD, "cpu", ""), (OFFLOAD, "meta", "meta"), (fsdp_compile.OffloadPolicy(), "cpu", "")],
    ids=["offloaded on a CPU", "offloaded beside a device", "not offloaded"],
)
def test_markers_say_where_a_shard_must_be_copied_to(policy: Any, mesh: str, copied_to: str) -> None:
    torch._dynamo.reset()
    model = on_mesh_of(mesh, fsdp_compile.fully_shard(nn.Linear(8, 8), offload_policy=policy))
    with recorded() as seen:
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 8, device=mesh))
    (joint,) = seen
    assert [spec_in(node).device for node in unshard_nodes(joint.graph)] == [copied_to] * 2


@pytest.mark.usefixtures("fake_group_of_four")
def test_edges_and_gradients_are_on_the_cpu_and_what_is_held_back_on_the_device() -> None:
    """Training over two devices in earnest, numbers apart: ``meta`` takes the GPU's part once more."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in (*model, model):
        fsdp_compile.fully_shard(module, offload_policy=OFFLOAD)
    on_mesh_of("meta", model)
    library = torch.library.Library("fsdpc", "IMPL")
    library.impl("to_host", lambda reduced, pinned, wait=True: torch.ones_like(reduced, device="cpu"), "Meta", allow_override=True)
    library.impl("wait_for_copies", lambda copies, device: None, "CPU")
    run = torch.compile(model, backend="passes", fullgraph=True)
    x = torch.ones(2, 8, device="meta")
    try:
        for sync in (True, True, False):
            model.set_requires_gradient_sync(sync)
            run(x).sum().backward()
        held_back = [grad for unit in units_in(model) for grad in unit.accumulation.held.pending.values()]
        for unit in units_in(model):
            unit.accumulation.held = Held()  # on meta no graph takes them
        model.set_requires_gradient_sync(True)
        run(x).sum().backward()
        asked = torch.autograd.grad(run(x).sum(), list(model.parameters()))
        with torch.no_grad():
            assert run(x).is_meta
    finally:
        library._destroy()
    assert len(held_back) == 4 and all(grad.is_meta for grad in held_back)
    for param, grad in zip(model.parameters(), asked):
        assert {param.device.type, param.grad.device.type, grad.device.type} == {"cpu"}
        assert torch.equal(param.grad.to_local(), torch.full_like(param.to_local(), 3))


@pytest.mark.usefixtures("fake_group_of_four")
def test_a_shard_that_was_moved_is_refused() -> None:
    its_spec = spec(device="cuda:0").text
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"materialized on CPU when .* up.weight is on cuda:0"):
        markers.unshard(torch.empty(2, 3, device="cuda"), None, None, "reduce", spec=its_spec)
