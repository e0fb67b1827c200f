"""Kernels as Inductor fused and sorted them: each launch stands between the products that the plan put it between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from fsdp_compile.passes import ScheduleInPlannedOrder
from fsdp_compile.passes import _torch_compat_kernels as compat
from fsdp_compile.passes.kernels import Kernels, is_our_launch
from tests.compiling import no_kernels_built
from tests.models import Checkpointed, Stack, shard
from tests.recording import recorded

pytestmark = pytest.mark.usefixtures("fake_group_of_four")

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def _launches_among_products(graph: fx.Graph) -> list[tuple[str, int]]:
    """Each launch of a graph, and how many products are before it."""
    found, products = [], 0
    for node in graph.nodes:
        products += node.target in PRODUCTS
        if is_our_launch(node):
            found.append((node.name, products))
    return found


def _generated(snodes: list[Any]) -> list[tuple[str, int]]:
    """The same of the kernels that are generated."""
    kernels, found, products = Kernels(snodes), [], 0
    for snode in snodes:
        if kernels.is_launch(snode):
            found.append((next(one.name for one in kernels.origins[snode] if is_our_launch(one)), products))
        elif compat.is_heavy(snode):
            products += any(node.target in PRODUCTS for node in kernels.origins[snode])
    return found


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    seen: list[list[tuple[str, int]]] = []
    schedule = ScheduleInPlannedOrder.__call__

    def and_look(self: ScheduleInPlannedOrder, snodes: list[Any]) -> list[Any]:
        planned = schedule(self, snodes)
        seen.append(_generated(planned))
        return planned

    monkeypatch.setattr(ScheduleInPlannedOrder, "__call__", and_look)
    return seen


@pytest.mark.parametrize("make", [Stack, pytest.param(Checkpointed, marks=pytest.mark.more)])
def test_launches_stay_between_the_products_of_the_plan(make: type[nn.Module], generated: Any) -> None:
    model = shard(make(4))
    torch._dynamo.reset()
    with no_kernels_built(), recorded() as records:
        torch.compile(model, fullgraph=True)(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    planned = [_launches_among_products(one.graph) for one in records if one.stage in ("forward", "backward")]
    assert [len(one) for one in planned] == [len(one) for one in generated]
    assert generated == planned
