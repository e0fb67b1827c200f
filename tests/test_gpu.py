"""What only a GPU shows: streams, pinned copies, memory of the process group, CUDA graphs. One GPU is enough."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import CPUOffloadPolicy, fully_shard
from fsdp_compile.core.unit import units_in
from fsdp_compile.eager.running import running
from fsdp_compile.optim import StatesOnHost
from tests.comparing import assert_same_grads, assert_same_params
from tests.models import Block
from tests.on_ranks import _on
from tests.ranks import Ranks
from tests.test_accumulate import compiled_autograd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 3
on_gpus = _on("gpus")


class NcclRanks(Ranks):
    """One process a GPU, two at most; or as many as FSDP_COMPILE_GPU_RANKS says, which may share a GPU."""

    def __init__(self) -> None:
        num_ranks = int(os.environ.get("FSDP_COMPILE_GPU_RANKS", min(2, torch.cuda.device_count())))
        super().__init__(num_ranks, backend="nccl")

    def run(self, fn: Callable[..., Any], *args: Any, limit_s: float = 60) -> list[Any]:
        """In less time than on a CPU: a collective that hangs is not to take all the minutes that a GPU can be had."""
        return super().run(fn, *args, limit_s=limit_s)


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    ranks = NcclRanks()
    yield ranks  # type: ignore[misc]
    ranks.stop()


def _pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    unsharded = nn.Sequential(*(Block() for _ in range(3)))
    model = copy.deepcopy(unsharded)
    if not options:
        model.cuda()
    for block in model:
        fully_shard(block, **options)
    return unsharded.cuda(), fully_shard(model, **options)


def _full(tensor: DTensor) -> torch.Tensor:
    """All of it on the GPU, wherever its shards are: NCCL gathers nothing from the CPU."""
    shard = tensor.to_local().cuda()
    shape, stride = tensor.shape, tensor.stride()
    on_gpu = DTensor.from_local(shard, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return on_gpu.full_tensor()


def _train(model: nn.Module, unsharded: nn.Module, run: Any, event: bool = False) -> None:
    """Every rank has the same batch, so the mean over ranks is the gradient; inputs come from the CPU."""
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, unsharded)]
    for step in range(STEPS):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        run(batch).square().mean().backward()
        unsharded(batch.cuda()).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), unsharded.parameters()):
            assert isinstance(ours.grad, DTensor), name
            torch.testing.assert_close(_full(ours.grad), theirs.grad, atol=1e-5, rtol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if event:
            done = torch.cuda.Event()
            done.record()
            model.set_post_optim_event(done)


@on_gpus
def test_eager_training_frees_what_it_gathered() -> None:
    unsharded, model = _pair()
    _train(model, unsharded, model, event=True)
    assert_same_params(model, unsharded, atol=1e-4, rtol=1e-3)
    for run in map(running, units_in(model)):
        assert run.gathered is None or not run.gathered.is_full


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@on_gpus
def test_compiled_training(mode: str | None) -> None:
    unsharded, model = _pair()
    _train(model, unsharded, torch.compile(model, fullgraph=True, mode=mode))


@on_gpus
def test_memory_does_not_grow() -> None:
    """Allocated bytes after each step: what streams hold on to would grow."""
    unsharded, model = _pair()
    seen = []
    for _ in range(6):
        _train(model, unsharded, model)
        gc.collect()  # of the optimizers
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert len(set(seen[1:])) == 1, seen


@on_gpus
def test_offloaded_shards_and_gradients_are_pinned() -> None:
    unsharded, model = _pair(offload_policy=CPUOffloadPolicy())
    assert all(param.device.type == "cpu" and param.to_local().is_pinned() for param in model.parameters())
    _train(model, unsharded, model)
    for param in model.parameters():
        param.grad = None
    model(torch.ones(2, 16)).sum().backward()
    assert all(param.grad.device.type == "cpu" for param in model.parameters())


@pytest.mark.parametrize(("pin_memory", "mode"), [(True, None), (False, None), (True, "reduce-overhead")])
@on_gpus
def test_offloaded_shards_train_in_one_graph(pin_memory: bool, mode: str | None) -> None:
    unsharded, model = _pair(offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*eagerly.*")
        run = torch.compile(model, fullgraph=True, mode=mode)
        _train(model, unsharded, run)
        run(torch.ones(2, 16)).sum().backward()
    for param in model.parameters():
        for shard in (param, param.grad):
            assert shard.device.type == "cpu" and shard.to_local().is_pinned() == pin_memory


@on_gpus
def test_offloaded_gradients_add_up() -> None:
    """Held back on the GPU, added to what is there on the CPU, delivered to a hook, inside a compiled step."""
    unsharded, model = _pair(offload_policy=CPUOffloadPolicy())
    run = torch.compile(model, fullgraph=True)
    for sync in (True, False, True):
        model.set_requires_gradient_sync(sync)
        run(torch.ones(4, 16)).square().mean().backward()
        unsharded(torch.ones(4, 16, device="cuda")).square().mean().backward()
    seen = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen.update({name: _full(param.grad)}))
    run(torch.ones(4, 16)).square().mean().backward()

    @torch.compile
    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    with compiled_autograd():
        step(torch.ones(4, 16))
    for _ in range(2):
        unsharded(torch.ones(4, 16, device="cuda")).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), unsharded.parameters()):
        torch.testing.assert_close(_full(ours.grad), theirs.grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen[name], theirs.grad, atol=1e-5, rtol=1e-4)


@on_gpus
def test_offloaded_shards_and_gradients_leave_the_gpu() -> None:
    """After a step whose gradients are there; these are read at once."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    num_bytes = sum(param.numel() * 4 for param in model.parameters())
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(), reshard_after_forward=True)
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    run = torch.compile(model, fullgraph=True)
    for _ in range(3):
        model.zero_grad()
        run(torch.ones(8, 2048)).square().mean().backward()
        at_once = [param.grad.to_local().clone() for param in model.parameters()]
        torch.cuda.synchronize()
        for param, first in zip(model.parameters(), at_once):
            assert torch.equal(param.grad.to_local(), first)
    num_allocated = torch.cuda.memory_allocated()
    assert num_allocated < num_bytes / 3, num_allocated  # what cuBLAS takes for itself: 32 MiB on an H100


@pytest.mark.parametrize("compiled", [False, True])
@on_gpus
def test_an_offloaded_shard_on_the_gpu_is_refused(compiled: bool) -> None:
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy()).cuda()
    with pytest.raises(RuntimeError, match=r"weight.*CPU"):
        (torch.compile(model) if compiled else model)(torch.ones(2, 4))


@on_gpus
def test_offloaded_shards_are_updated_on_the_gpu() -> None:
    unsharded, model = _pair(offload_policy=CPUOffloadPolicy())
    seen: set[str] = set()

    class Seeing(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.update(one.device.type for group in self.param_groups for one in group["params"])
            return super().step(closure)

    optimizer, expected = StatesOnHost(model.parameters(), Seeing), torch.optim.AdamW(unsharded.parameters())
    run = torch.compile(model, fullgraph=True)
    for _ in range(STEPS):
        run(torch.ones(2, 16)).square().mean().backward()
        unsharded(torch.ones(2, 16, device="cuda")).square().mean().backward()
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    assert seen == {"cuda"} and all(param.device.type == "cpu" for param in model.parameters())
    assert_same_params(model, unsharded, atol=1e-4)


@on_gpus
def test_optimizer_states_leave_the_gpu_between_steps() -> None:
    class OneByOne(StatesOnHost):
        _bucket_bytes = 1

    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(8)]
    others = copy.deepcopy(params)
    for one, other in zip(params, others):
        one.grad = other.grad = torch.randn_like(one)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = OneByOne(params, torch.optim.AdamW, lr=1e-2)
    for _ in range(STEPS):
        optimizer.step()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert torch.cuda.max_memory_allocated() - before < 5 * 8 << 20  # of three parameters, and what AdamW computes with
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(one.is_pinned() for one in states)
    expected = torch.optim.AdamW(others, lr=1e-2)
    for _ in range(STEPS):
        expected.step()
    for one, other in zip(params, others):
        assert torch.equal(one, other)


def _groups_memory() -> bool:
    """Whether there is such memory: NCCL has its own only where the driver knows multicast."""
    unsharded, model = _pair()
    gpu = torch.device("cuda", torch.cuda.current_device())
    if not dist.group.WORLD._get_backend(gpu).supports_tensor_alloc(gpu):
        return False
    for unit in model.modules():
        if hasattr(unit, "set_allocate_memory_from_process_group_for_comm"):
            unit.set_allocate_memory_from_process_group_for_comm(True)
    for _ in range(2):  # the second gathers are into memory that the first ones gave back
        model(torch.ones(2, 16)).square().mean().backward()
        unsharded(torch.ones(2, 16, device="cuda")).square().mean().backward()
    assert_same_grads(model, unsharded)
    return True


def test_gathers_in_memory_of_the_process_group(gpus: Ranks) -> None:
    if not all(gpus.run(_groups_memory)):
        pytest.skip("NCCL allocates no memory on this GPU: no multicast")
