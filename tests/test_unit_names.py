"""One unit has one name: in each graph that is cut from a model, and in every table that tells of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_compile import fully_shard, inspect
from fsdp_compile.core.unit import unit_of
from fsdp_compile.passes.ir.provenance import find_unshards
from fsdp_compile.tools.inspect import Report
from fsdp_compile.tools.tables import format_unit
from tests.models import Stack, shard
from tests.recording import recorded


class Pairs(nn.Module):
    """Units of two modules that stand apart, and an embedding that the root reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.ups = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, norm in zip(self.ups, self.norms):
            x = norm(torch.relu(up(x)))
        return F.linear(x, self.embed.weight)


def sharded_pairs() -> Pairs:
    model = Pairs()
    fully_shard(model.embed)
    for up, norm in zip(model.ups, model.norms):
        fully_shard([up, norm])
    return fully_shard(model)


def sharded_checkpoints() -> Stack:
    model = Stack(2)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return shard(model)


def test_one_walk_of_the_model_names_all_its_units(fake_group_of_four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_pairs()
    walks = []
    walk = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda self, *rest: (walks.append(self), walk(self, *rest))[1])
    units = [unit_of(one) for one in (model, model.embed, model.ups[0], model.norms[1])]
    for _ in range(2):
        assert [unit.name for unit in units] == [
            "(root) (Pairs)", "embed (Embedding)", "ups.0 (Linear), norms.0 (LayerNorm)", "ups.1 (Linear), norms.1 (LayerNorm)"
        ]  # fmt: skip
    assert walks.count(model) == 1
    model.norms[0], model.norms[1] = model.norms[1], model.norms[0]
    assert units[3].name == "ups.1 (Linear), norms.0 (LayerNorm)"


MODELS = [
    (
        sharded_pairs,
        {"embed (Embedding)": 1, "ups.0, norms.0 (Linear+LayerNorm)": 4, "ups.1, norms.1 (Linear+LayerNorm)": 4},
    ),
    (sharded_checkpoints, {"(Stack)": 4, "layers.0 (CheckpointWrapper)": 6, "layers.1 (CheckpointWrapper)": 6}),
]


def inspected(model: nn.Module, backend: str) -> Report:
    torch._dynamo.reset()
    with inspect(model) as report:
        torch.compile(model, backend=backend)(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    return report


@pytest.mark.compat
@pytest.mark.parametrize(("make", "units"), MODELS)
def test_a_unit_is_called_by_its_path(
    fake_group_of_four: None, make: Callable[[], nn.Module], units: dict[str, int]
) -> None:
    joint = inspected(make(), "aot_eager").joint
    markers = find_unshards(joint.record.snapshots[-1])
    found = [format_unit(marker.unit) for marker in markers]
    assert {unit: found.count(unit) for unit in found} == units
    assert {marker.fqn.replace("_checkpoint_wrapped_module.", "") for marker in markers} == {
        name.replace("_checkpoint_wrapped_module.", "") for name, _ in make().named_parameters()
    }
    for unit in units:
        assert f"\n  {unit} " in str(joint)


@pytest.mark.more
@pytest.mark.parametrize(("make", "units"), MODELS)
def test_forward_and_backward_call_it_the_same(
    fake_group_of_four: None, make: Callable[[], nn.Module], units: dict[str, int]
) -> None:
    report = inspected(make(), "inductor")
    last, first = list(units)[-1], list(units)[-2]
    assert {launch.unit for launch in report.forward.launches} == set(units)
    reductions = [launch.unit for launch in report.backward.launches if launch.kind == "reduce_scatter"]
    assert set(reductions) == set(units)
    assert reductions.index(last) < reductions.index(first), "backward begins with the last unit"
    assert {launch.unit for launch in report.backward.launches} - {"ahead (vectors)"} == set(units)


def test_units_of_two_models_in_one_graph_have_names_of_their_own(fake_group_of_four: None) -> None:
    one, other = shard(Stack(1)), shard(Stack(1))

    def both(one: nn.Module, other: nn.Module, tokens: Tensor) -> Tensor:
        return one(tokens) + other(tokens)

    torch._dynamo.reset()
    with recorded() as records:
        torch.compile(both, backend="passes")(one, other, torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    stages = {record.stage: record.plan for record in records}
    expected = [f"{model}.{fqn}" for model in ("one", "other") for fqn, _ in one.named_parameters()]
    assert sorted(fqn for bucket in stages["forward"].gathers for fqn in bucket.fqns) == sorted(expected)
    assert sorted(fqn for bucket in stages["backward"].reduces for fqn in bucket.fqns) == sorted(expected)
    # A bucket is of one model, however alike the units are.
    for bucket in (*stages["forward"].gathers, *stages["backward"].gathers, *stages["backward"].reduces):
        assert len({fqn.partition(".")[0] for fqn in bucket.fqns}) == 1
    assert {bucket.unit for bucket in stages["forward"].gathers} == {
        "Stack:one", "Block:one.layers.0", "Stack:other", "Block:other.layers.0"
    }  # fmt: skip
