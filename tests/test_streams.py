"""What streams share is in order: of two uses of one piece of memory, none is left to chance. A missing wait is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import CPUOffloadPolicy, fully_shard
from fsdp_compile._torch_compat import autograd, dtensors
from tests.comparing import assert_same_grads, batches, local_loss, reference_backward
from tests.models import EvenBlock, Stack, pair, shard
from tests.on_ranks import on_two_ranks
from tests.ordering import CPU, History, Stream, watched

FOLDER = Path(__file__).parent.parent
MODEL, HOOK, AHEAD = Stream("the model's"), Stream("the hook's"), Stream("the prefetcher's")


def _model() -> Stack:
    """Offloaded blocks: frozen, halves with replicas and a hook, parts of four with a hook on a stream and a gather of
    the user's, one part alone.
    """
    torch.manual_seed(0)
    model = Stack(4, block=EvenBlock)
    model.layers[0].requires_grad_(False)
    for layer, sizes in zip(model.layers, [(1, 4), (2, 2), (1, 4), (4, 1)]):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        fully_shard(layer, mesh=mesh if sizes[0] > 1 else mesh["shard"], offload_policy=CPUOffloadPolicy())
    fully_shard(model)  # this one is not offloaded
    model.layers[1].set_all_reduce_hook(_double)
    model.layers[2].set_all_reduce_hook(_double, stream=HOOK)
    model.layers[2].set_custom_all_gather(_AtOnce())
    return model


class _AtOnce:
    """An all-gather that is done, on the stream on which it is called, when it returns."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output: Tensor, sent: Tensor, group: Any, async_op: bool) -> None:
        output.view(-1, sent.numel()).copy_(sent)


def _double(summed: Tensor) -> None:
    summed.mul_(2)


def _train(monkeypatch: pytest.MonkeyPatch, skips: Callable[..., bool]) -> set[str]:
    """Evaluate, and train for two steps of three micro-batches, the first of them held back; return what was not in order.

    The user gathers the root ahead on one stream, runs the model on another, and steps on the current one, on which
    autograd calls back, as it does on a GPU.
    """
    model, history = _model(), History(skips)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    at_end_of_backward = autograd.at_end_of_backward
    with watched(history, model) as device:
        steps = history.current

        def call_back(end: Callable[[], None]) -> None:
            def on_the_callers_stream() -> None:
                with device.run_on(steps):
                    end()

            at_end_of_backward(on_the_callers_stream)

        monkeypatch.setattr(autograd, "at_end_of_backward", call_back)
        for _ in range(2):
            for stream in (AHEAD, MODEL):
                device.wait(stream, device.mark(steps))
            with device.run_on(AHEAD):
                model.unshard(async_op=True)
            with device.run_on(MODEL), torch.no_grad():
                model(torch.arange(8).view(2, 4))
            with device.run_on(AHEAD):
                torch.ones(3)
            for micro in range(3):
                model.set_requires_gradient_sync(micro > 0)
                with device.run_on(MODEL):
                    model(torch.arange(8).view(2, 4)).sum().backward()
            optim.step()
            optim.zero_grad()
            for param in model.layers[0].parameters():
                dtensors.local_tensor(param).mul_(0.5)
    return history.unordered


@pytest.mark.usefixtures("fake_group_of_four")
def test_everything_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def skips(*what: str) -> bool:
        asked.add(what)
        return False

    assert _train(monkeypatch, skips) == set()
    ours = {what for what in asked if what != ("wait", AHEAD.name, "current")}
    assert ours == {left_out for left_out, _ in FAULTS.values()}  # each kind of wait is needed, as the next test shows


# What is left out, and one of the pairs that are not ordered then.
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "shards are copied into memory that is in use": (
        ("wait", "to_device", MODEL.name), "to_device is given what a collective reads"),
    "a copied shard is used at once": (("wait", MODEL.name, "to_device"), "the model's reads what to_device writes"),
    "a hook begins before the sum is there": (
        ("wait", HOOK.name, MODEL.name), "the hook's writes what a collective writes"),
    "a hook's result is used at once": (("wait", MODEL.name, HOOK.name), "the model's reads what the hook's writes"),
    "a gradient is copied before it is there": (
        ("wait", "to_host", MODEL.name), "to_host reads what the model's writes"),
    "a gradient is freed while it is copied": (("record", "to_host"), "the model's is given what to_host reads"),
    "the CPU reads a gradient at once": (("synchronize", "to_host"), f"{CPU} reads what to_host writes"),
    "a collective's result is used at once": (("wait for a collective",), "the model's reads what a collective writes"),
    "the end of backward is not waited for": (
        ("wait", "current", MODEL.name), "current reads what the model's writes"),
    "the model begins before the step": (
        ("wait", MODEL.name, "current"), "the model's is given what current reads"),
    "what was gathered on another stream is freed at once": (
        ("record", MODEL.name), "the prefetcher's is given what the model's reads"),
}  # fmt: skip


@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    left_out, pair_of_uses = FAULTS[fault]
    assert pair_of_uses in _train(monkeypatch, lambda *what: what == left_out)


def test_one_module_asks_torch_for_streams() -> None:
    """What measures and profiles is apart: it runs beside no training."""
    asks = re.compile(r"torch\.(cuda\.)?(Stream|Event|stream)\(|current_stream\(|\b(record|wait)_(stream|event)\(|\.resize_\(")
    folders = [FOLDER / "passes", *(FOLDER / "fsdp_compile" / name for name in ("core", "graph", "eager", "api", "fsdp1", "optim"))]
    found = {path.name for folder in folders for path in folder.rglob("*.py") if asks.search(path.read_text())}
    assert found == {"streams.py"}


@pytest.mark.usefixtures("fake_group_of_four")
def test_the_next_blocks_shards_are_copied_while_a_block_computes() -> None:
    """Once a forward has shown the order; the current stream has not waited for those copies then."""
    model, history = Stack(3, block=EvenBlock), History()
    shard(model, offload_policy=CPUOffloadPolicy())
    seen: list[bool] = []

    def look(*_: Any) -> None:
        copied, waited_for = history.clock("to_device"), history.clock("current")
        seen.append(copied["to_device"] > waited_for["to_device"])

    with watched(history, model):
        model(torch.arange(8).view(2, 4)).sum().backward()
        for layer in model.layers:
            layer.up.register_forward_hook(look)
            layer.up.register_full_backward_hook(look)
        model(torch.arange(8).view(2, 4)).sum().backward()
    forward, backward = seen[:3], seen[3:]
    assert (forward[:2], backward[:2]) == ([True, True], [True, True])


@on_two_ranks
def test_copies_beside_the_current_stream_train_like_the_unsharded_model() -> None:
    """Two backwards, of which the second adds to gradients on the CPU."""
    unsharded, model = pair(offload_policy=CPUOffloadPolicy())
    history = History()
    with watched(history, model):
        for step in range(2):
            local_loss(model, step).backward()
    for step in range(2):
        reference_backward(unsharded, batches(step))
    assert_same_grads(model, unsharded)
    assert {"to_device", "to_host"} <= history.clocks.keys() and not history.unordered
