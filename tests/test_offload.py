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
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_compiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp_compile.api.classes import refresh
from fsdp_compile.core.accumulation import Held
from fsdp_compile.core.unit import Unit, units_in
from fsdp_compile.passes import GraphRecord
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.ir import markers
from fsdp_compile.passes.ir.provenance import unshard_nodes
from fsdp_compile.passes.schedule.planner import plan_graph
from fsdp_compile.tools.report import GraphReport
from tests.comparing import (
    assert_same_grads,
    assert_same_params,
    batches,
    full,
    loss_of,
    mine,
    reference_backward,
    train_and_compare,
)
from tests.compiling import compiled
from tests.models import BreakBlock, Checkpointed, Stack, mesh_of, pair, shard
from tests.ranks import Ranks
from tests.recording import recorded
from tests.test_compiled_autograd import Single, compiled_autograd
from tests.test_extension import InEights
from tests.test_passes import Builder, spec
from tests.test_passes import offloaded as offloaded_spec

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


def _train(backend: str, make: Callable[[], Stack], options: dict[str, Any]) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")) if options.pop("hsdp", False) else None
    with shards_elsewhere() as counts, nothing_runs_eagerly():
        unsharded, model = offloaded(make, mesh=mesh, **options)
        run = compiled(model, backend)
        train_and_compare(run, model, unsharded)
        counts.clear()
        loss_of(run(batches(0)[dist.get_rank()])).backward()
        return dict(counts)


def _small() -> Stack:
    return Stack(1)


def _tied() -> Stack:
    return Stack(2, tied=True)


def _uneven() -> Stack:
    return Stack(2, dim=17)


@pytest.mark.parametrize(
    ("backend", "make", "options"),
    [
        pytest.param("aot_eager", _small, {}, marks=pytest.mark.more),
        pytest.param("passes", _small, {"reshard_after_forward": True}, marks=[pytest.mark.compat, pytest.mark.more]),
        pytest.param("passes", Stack, {"reshard_after_forward": False}, marks=pytest.mark.more),
        pytest.param("passes", Stack, {"hsdp": True}, marks=pytest.mark.more),
        pytest.param("passes", _tied, {}, marks=pytest.mark.more),
        pytest.param("passes", _uneven, {}, marks=pytest.mark.more),
        pytest.param("passes", Checkpointed, {}, marks=pytest.mark.more),
        pytest.param("aot_eager", Checkpointed, {}, marks=pytest.mark.more),
    ],
)
def test_trains_like_the_unsharded_model(
    two_ranks: Ranks, backend: str, make: Callable[[], Stack], options: dict[str, Any]
) -> None:
    for counts in two_ranks.run(_train, backend, make, options):
        if backend == "passes":
            assert counts["waits"] == 1  # for the whole backward
            assert counts["to_host"] < counts["to_device"]  # one a bucket; each shard is copied by itself
        else:
            assert counts["waits"] == counts["to_host"] > 1


def _like_resident(backend: str, options: dict[str, Any], drive: Callable[[Stack, Any, int], None]) -> None:
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


def _plainly(model: Stack, run: Any, step: int) -> None:
    loss_of(run(mine(step))).backward()


def _accumulating(model: Stack, run: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(run(mine(3 * step + micro))).backward()


def _adding(model: Stack, run: Any, step: int) -> None:
    """Each backward synchronizes, and adds to gradients that are there."""
    for micro in range(2):
        loss_of(run(mine(2 * step + micro))).backward()


def _evaluating(model: Stack, run: Any, step: int) -> None:
    with torch.no_grad():
        run(mine(step))
    _plainly(model, run, step)


def _freezing(model: Stack, run: Any, step: int) -> None:
    model.layers[0].up.weight.requires_grad_(False)
    _plainly(model, run, step)


def _deciding_in_backward(model: Stack, run: Any, step: int) -> None:
    losses = [loss_of(run(mine(2 * step + micro))) for micro in range(2)]
    for micro, loss in enumerate(losses):
        model.set_requires_gradient_sync(micro == 1)
        loss.backward()


@pytest.mark.parametrize(
    ("drive", "backend", "options"),
    [
        pytest.param(_accumulating, "aot_eager", {}, marks=pytest.mark.more),
        pytest.param(_plainly, "passes", {"mp_policy": BF16}, marks=pytest.mark.more),
        pytest.param(_accumulating, "passes", {"mp_policy": BF16}, marks=pytest.mark.more),
        pytest.param(_adding, "aot_eager", {}, marks=pytest.mark.more),
        pytest.param(_evaluating, "passes", {}, marks=pytest.mark.more),
        pytest.param(_freezing, "passes", {}, marks=pytest.mark.more),
        pytest.param(_deciding_in_backward, "aot_eager", {}, marks=pytest.mark.more),
    ],
)
def test_the_numbers_are_those_of_resident_shards(
    two_ranks: Ranks, drive: Any, backend: str, options: dict[str, Any]
) -> None:
    two_ranks.run(_like_resident, backend, options, drive)


def _partial_sums(backend: str) -> None:
    """Sums over the shards alone wait on the device for the one over replicas."""
    mesh = mesh_of("replicate", "shard")
    with shards_elsewhere(), nothing_runs_eagerly():
        unsharded, model = offloaded(_small, mesh=mesh)
        run = compiled(model, backend)
        for step in range(2):
            for micro in range(2):
                model.set_requires_all_reduce(micro == 1)
                loss_of(run(mine(2 * step + micro))).backward()
                reference_backward(unsharded, batches(2 * step + micro))
            assert_same_grads(model, unsharded)
        slices = offloaded(_small, reshard_after_forward=2)
        train_and_compare(compiled(slices[1], backend), slices[1], slices[0], steps=2)


@pytest.mark.more
@pytest.mark.parametrize("backend", ["aot_eager", "passes"])
def test_replicas_and_slices(four_ranks: Ranks, backend: str) -> None:
    four_ranks.run(_partial_sums, backend)


def _watched() -> None:
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
        loss_of(run(mine(0))).backward()
        reference_backward(unsharded, batches(0))
        assert_same_grads(model, unsharded)
        expected = {fqn: param.grad for fqn, param in unsharded.named_parameters()}
        assert seen.keys() == expected.keys()
        asked = dict(zip(expected, torch.autograd.grad(loss_of(run(mine(0))), list(model.parameters()))))
        for fqn, grad in expected.items():
            torch.testing.assert_close(seen[fqn], grad, atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(full(asked[fqn]), grad, atol=1e-6, rtol=1e-4)


@pytest.mark.more
def test_whoever_reads_a_gradient_at_once_finds_it_complete(two_ranks: Ranks) -> None:
    two_ranks.run(_watched)


def _in_a_compiled_step(backend: str) -> None:
    with shards_elsewhere() as counts, compiled_autograd():
        unsharded, model = offloaded(Single)

        @torch.compile(backend=backend)
        def step(tokens: Tensor) -> Tensor:
            loss = loss_of(model(tokens))
            loss.backward()
            return loss

        for number in range(2):
            step(mine(number))
            reference_backward(unsharded, batches(number))
            assert_same_grads(model, unsharded)
        assert counts["waits"]


@pytest.mark.more
@pytest.mark.parametrize("backend", ["aot_eager", "passes"])
def test_backward_inside_the_compiled_step(two_ranks: Ranks, backend: str) -> None:
    two_ranks.run(_in_a_compiled_step, backend)


def _broken() -> None:
    with shards_elsewhere():
        unsharded, model = offloaded(lambda: Stack(2, block=BreakBlock))
        train_and_compare(torch.compile(model), model, unsharded, steps=2)
        parts = offloaded(lambda: Stack(2))
        for layer in parts[1].layers:
            layer.compile()
        train_and_compare(parts[1], parts[1], parts[0], steps=2)
        assert_same_params(parts[1], parts[0], atol=1e-4, rtol=1e-3)


@pytest.mark.more
def test_graphs_of_parts_of_the_model(two_ranks: Ranks) -> None:
    two_ranks.run(_broken)


def _extended() -> None:
    with shards_elsewhere():
        torch.manual_seed(0)
        model = Stack(2)
        model.layers[1].down.weight = nn.Parameter(InEights(model.layers[1].down.weight.detach()))
        shard(model, offload_policy=OFFLOAD)
        with pytest.warns(UserWarning, match=r"layers.1 .* CPUOffloadPolicy with the all-gather extension of down.weight"):
            loss_of(torch.compile(model, backend="aot_eager")(mine(0))).backward()
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.more
def test_with_an_extension_the_unit_runs_eagerly_and_says_so(two_ranks: Ranks) -> None:
    two_ranks.run(_extended)


def test_a_report_says_what_is_copied() -> None:
    b = Builder()
    weight = offloaded_spec(postdivide=1.0)
    full = b.unshard(b.input("shard", 2, 3), weight)
    graph = b.output(b.reduce(full, weight), b.reduce(full, offloaded_spec(fqn="other", num_replicas=2, replicate_group="r")))
    plan = plan_graph(graph, "backward")
    insert(graph, plan)
    report = GraphReport(GraphRecord("backward", plan, 1, 2, snapshots=[graph]), 0)
    copied = [(one.kind, one.num_bytes, one.host_bytes) for one in report.launches]
    # BF16 travels; what is stored, and what the optimizer reads, is FP32. A bucket leaves the device once.
    assert copied == [("all_gather", 12, 24), ("reduce_scatter", 24, 24), ("reduce_scatter", 24, 0), ("all_reduce", 24, 24)]
    header, *rows = str(report).splitlines()[1:6]
    assert header.endswith("bucket  copied  host") and [row.split("  ")[-1].strip() for row in rows[:2]] == ["24 B", "24 B"]


@pytest.mark.compat
def test_only_full_parameters_and_their_gradients_are_on_the_device() -> None:
    """A joint graph over two devices, cut by the partitioner: ``meta`` takes the GPU's part."""
    graphs = {}

    def keep(stage: str) -> Any:
        def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs[stage] = {node.name: node.meta["val"] for node in module.graph.nodes if node.op != "output"}
            return module

        return make_boxed_compiler(compiler)

    its_spec = spec(device="meta", dtype=torch.bfloat16).kwargs()

    def product(x: Tensor, shard: Tensor, edge: Tensor) -> Tensor:
        return torch.mm(x, markers.unshard(shard, edge, None, "reduce", **its_spec))

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
    assert [node.kwargs["device"] for node in unshard_nodes(joint.graph)] == [copied_to] * 2


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.compat
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
    # Inductor takes an output on meta for a constant, and leaves away what computes it.
    run = torch.compile(model, fullgraph=True, options={"joint_graph_constant_folding": False})
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
    its_spec = spec(device="cuda:0").kwargs()
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"materialized on CPU when .* up.weight is on cuda:0"):
        markers.unshard(torch.empty(2, 3, device="cuda"), None, None, "reduce", **its_spec)
