"""Every path launches what the schedule says, in its order, so ranks may run on any of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile import fully_shard
from tests.models import HUGGING_FACE, PLAIN, Entry
from tests.uses import heard, launched, scheduled

# What these launch is not the same: see docs/ranks-that-differ.md.
PARTS = ("unused", "tied_across_groups")
ALIKE = ("sequential", "parameter_dict")  # use their parameters as "loop" and "parameter_list" do

BY_DEFAULT, ALL_KEPT, NONE_KEPT = (
    {"blocks": blocks, "root": root} for blocks, root in ((True, None), (False, False), (True, True))
)
OF_EACH_KIND = ("loop", "tied_in_group", "frozen", "used_twice")  # what is kept depends on how parameters are read


def _sharded(entry: Entry, **options: Any) -> tuple[nn.Module, list[nn.Module]]:
    torch.manual_seed(0)
    model: nn.Module = entry.build()
    blocks = entry.blocks(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=options["blocks"])
    return fully_shard(model, reshard_after_forward=options["root"]), blocks


def _launches(entry: Entry, mode: str, step: int, **options: Any) -> list[tuple[str, ...]]:
    """Return what the step with this number launches; forward and backward are set apart."""
    torch._dynamo.reset()
    model, blocks = _sharded(entry, **options)
    run: Any = torch.compile(model, backend="passes") if mode == "whole" else model
    for block in blocks if mode == "blocks" else ():
        block.compile(backend="passes")
    for number in range(step + 1):
        with heard() as found:
            loss: Tensor = entry.loss(run, **entry.batch(200 * number))
            found.append(("backward",))
            loss.backward()
    return found


@pytest.mark.filterwarnings("ignore:.* returned a view tensor")  # T5's blocks do
@pytest.mark.usefixtures("fake_group_of_four", "limits_for_small_models")
@pytest.mark.parametrize(
    "name, options",
    [
        *(pytest.param(name, BY_DEFAULT, id=name) for name in (*PLAIN, "llama") if name not in (*PARTS, *ALIKE)),
        pytest.param("mixtral", BY_DEFAULT, id="mixtral", marks=pytest.mark.more),
        pytest.param("t5", BY_DEFAULT, id="t5", marks=pytest.mark.slow),
        *(pytest.param(name, ALL_KEPT, id=f"{name}-all kept", marks=pytest.mark.more) for name in OF_EACH_KIND),
        *(pytest.param(name, NONE_KEPT, id=f"{name}-none kept", marks=pytest.mark.slow) for name in OF_EACH_KIND),
    ],
)
def test_each_path_launches_the_same(name: str, options: dict[str, Any]) -> None:
    entry = (PLAIN | HUGGING_FACE)[name]
    model, _ = _sharded(entry, **options)
    torch.manual_seed(0)
    expected = launched(scheduled(model, entry.build(), lambda one: entry.loss(one, **entry.batch(0))))
    assert len(expected) > 3
    for mode, step in (("eager", 0), ("eager", 2), ("whole", 2), ("blocks", 2)):  # 0: it does not know what comes next
        assert _launches(entry, mode, step, **options) == expected, (mode, step)
