"""Every path launches the same collectives in the same order, so ranks may run on any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile import fully_shard
from fsdp_compile.passes.wire import layout
from fsdp_compile.passes.wire.layout import BucketLimits
from fsdp_compile.passes.wire.ledger import Called, Issued, ledger
from tests.models import HUGGING_FACE, PLAIN, Entry

# What these launch is not the same: see docs/ranks-that-differ.md.
PARTS = ("unused", "tied_across_groups")


@pytest.fixture(autouse=True)
def _limits_for_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights of the zoo be large enough to travel alone, as those of real models are."""
    for backend in ("gloo", "nccl"):
        limits = BucketLimits(small_bytes=300, bucket_bytes=1200, neighbours_bytes=2400)
        monkeypatch.setitem(layout._LIMITS, backend, limits)


def _sent(entry: Issued | Called) -> Iterator[tuple[str, ...]]:
    """Yield each collective as its kind and the names of its parameters in the model."""
    if isinstance(entry, Called):
        yield from ((one.kind, *one.names) for one in entry.text.launches)
        return
    unit = entry.unit()
    path = unit.path_of(unit.modules[0])
    yield entry.kind, *(".".join(filter(None, (path, spec.fqn))) for spec in entry.specs)


def _launches(entry: Entry, mode: str, step: int, **options: Any) -> list[tuple[str, ...]]:
    """Return what the step with this number launches; forward and backward are set apart."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = entry.build()
    blocks = entry.blocks(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=options["blocks"])
    fully_shard(model, reshard_after_forward=options["root"])
    run: Any = torch.compile(model, backend="passes") if mode == "whole" else model
    for block in blocks if mode == "blocks" else ():
        block.compile(backend="passes")
    launched: list[tuple[str, ...]] = []
    for number in range(step + 1):
        launched.clear()
        ledger.hear = lambda one: launched.extend(_sent(one))
        try:
            loss: Tensor = entry.loss(run, **entry.batch(200 * number))
            launched.append(("backward",))
            loss.backward()
        finally:
            ledger.hear = None
    return launched


@pytest.mark.filterwarnings("ignore:.* returned a view tensor")  # T5's blocks do
@pytest.mark.usefixtures("fake_group_of_four")
@pytest.mark.parametrize(
    "options",
    [
        {"blocks": True, "root": None},
        pytest.param({"blocks": True, "root": True}, marks=pytest.mark.more),
        pytest.param({"blocks": False, "root": False}, marks=pytest.mark.more),
    ],
    ids=["as by default", "all gathered again", "all kept"],
)
@pytest.mark.parametrize(
    "name",
    [*(name for name in PLAIN if name not in PARTS), "llama", *(pytest.param(name, marks=pytest.mark.more) for name in HUGGING_FACE if name != "llama")],
)
def test_each_path_launches_the_same(name: str, options: dict[str, Any]) -> None:
    entry = (PLAIN | HUGGING_FACE)[name]
    eagerly = _launches(entry, "eager", 2, **options)
    assert len(eagerly) > 3
    assert _launches(entry, "eager", 0, **options) == eagerly  # the first step, which does not know what comes next
    for mode in ("whole", "blocks"):
        assert _launches(entry, mode, 2, **options) == eagerly, mode
