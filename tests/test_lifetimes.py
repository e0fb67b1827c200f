"""What a model brought goes with it, and guards change nothing: what is kept, by whom, and for how long."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import fully_shard, register_fsdp_forward_method
from fsdp_compile.core.unit import unit_of
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fake_group_of_four")


def _sharded_once(backend: str | None) -> dict[str, weakref.ref[Any]]:
    """Train a model of a class of its own for two micro-batches; what to look for when it is gone."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(x).sum()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    model = fully_shard(Local(), mesh=mesh, reshard_after_forward=2)
    register_fsdp_forward_method(model, "score")
    score = compiled(model.score, backend, fullgraph=False)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        score(torch.ones(2, 8)).backward()
    shard, unit = model.linear._parameters["weight"], unit_of(model)
    known = {"model": model, "user's class": Local, "generated class": type(model), "mesh": mesh}
    known |= {"unit": unit, "its settings": unit.settings, "shard": shard, "its memory": shard._local_tensor}
    known |= {"gradient": shard.grad}
    return {name: weakref.ref(one) for name, one in known.items()}


def _collect() -> None:
    for _ in range(2):  # a generated class goes first, then what it was made of
        gc.collect()


def test_nothing_of_an_eager_model_outlives_it() -> None:
    """Dynamo's caches and torch's are left alone."""
    known = _sharded_once(None)
    _collect()
    kept_by_torch = {"mesh"}  # torch keeps the specs of DTensors, and with them their meshes, for good
    assert {name for name, reference in known.items() if reference() is not None} <= kept_by_torch


def test_a_compiled_model_goes_and_leaves_what_dynamo_keeps() -> None:
    """Compiled code guards on classes, so these stay until Dynamo forgets it; parameters do not."""
    known = _sharded_once("passes")
    _collect()
    alive = {name for name, reference in known.items() if reference() is not None}
    assert not alive & {"model", "unit", "its settings", "shard", "its memory", "gradient"}
    torch._dynamo.reset()
    _collect()
    assert {name for name, reference in known.items() if reference() is not None} <= {"mesh"}


def test_a_guard_only_looks() -> None:
    """Also where there is something new to see: another tensor, a hook, a frozen parameter, a write to ``data``."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    watch = unit_of(model).watch  # type: ignore[union-attr]
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 8)).sum().backward()

    def everything() -> list[Any]:
        params = [param for module in model for param in module._parameters.values()]
        kept = [(id(module), *((name, id(value)) for name, value in vars(module).items())) for module in model]
        sinks = [tuple((name, id(value)) for name, value in vars(one.sink).items()) for one in unit_of(model).params]  # type: ignore[union-attr]
        nodes = [one.sink.edge.grad_fn for one in unit_of(model).params]  # type: ignore[union-attr]
        return [*kept, *sinks, nodes, [(id(one), one.grad, dict(one._backward_hooks or {})) for one in params]]

    first, second = model[0].weight, model[1].weight
    at_first = watch.seen()
    handle = first.register_hook(lambda grad: None)
    second.requires_grad_(False)
    with torch.no_grad():
        first._local_tensor.data = first._local_tensor.clone()
    before = everything()
    assert watch.seen() != at_first
    assert everything() == before
    handle.remove()


def test_many_forward_methods_compile_each_by_itself() -> None:
    """Dynamo counts recompilations by code object, and gives up where there are more than it may."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

    for number in range(4):
        # As four methods written out would have it: code of its own for each.
        scope: dict[str, Any] = {}
        exec(f"def times_{number}(self, x): return self.linear(x) * {number}", scope)
        setattr(Many, f"times_{number}", scope[f"times_{number}"])
    model = fully_shard(Many())
    for number in range(4):
        register_fsdp_forward_method(model, f"times_{number}")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            method = torch.compile(getattr(model, f"times_{number}"), backend="aot_eager", fullgraph=True)
            assert method(torch.ones(2, 8)).shape == (2, 8)


def test_equal_modules_share_what_a_method_compiles_to() -> None:
    class Scored(nn.Linear):
        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).sum()

    blocks = [fully_shard(Scored(8, 8)) for _ in range(3)]
    for block in blocks:
        register_fsdp_forward_method(block, "score")
    assert len({block.score.__func__ for block in blocks}) == 1


def test_a_replaced_shard_is_taken_after_a_refresh() -> None:
    """Its unit has another shard, whose edge is as good as before."""
    model = fully_shard(nn.Linear(8, 8))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(torch.ones(2, 8)).sum().backward()
    old, model.weight = model._parameters["weight"], nn.Parameter(model._parameters["weight"].detach() * 3)
    old.grad = None
    for _ in range(2):  # before, and after
        run(torch.ones(2, 8)).sum().backward()
        assert old.grad is None and model._parameters["weight"].grad is not None
        model._parameters["weight"].grad = None
        fsdp_compile.configure(model, bucketing="none")


@pytest.mark.filterwarnings("ignore:set_keep_unsharded_storage has no effect")
def test_what_was_compiled_alone_gets_a_root() -> None:
    block = fully_shard(nn.Linear(8, 8))
    torch.compile(block, backend="aot_eager")(torch.ones(2, 8))
    block.set_keep_unsharded_storage(True)
    model = fully_shard(nn.Sequential(block, nn.Linear(8, 8)))
    assert unit_of(block).root is unit_of(model)  # type: ignore[union-attr]


def test_a_mode_that_no_parameter_has_compiles_nothing() -> None:
    model = fully_shard(nn.Linear(8, 8))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    run(torch.ones(2, 8)).sum().backward()
    model.set_requires_all_reduce(False)  # which says something of replicas alone
    model.set_requires_all_reduce(True)
    with torch.compiler.set_stance("fail_on_recompile"):
        run(torch.ones(2, 8)).sum().backward()


def test_a_setting_of_a_unit_without_parameters_is_said() -> None:
    blocks = [fully_shard(nn.Linear(8, 8)) for _ in range(2)]
    model = fully_shard(nn.Sequential(*blocks))
    model.set_modules_to_forward_prefetch([blocks[1]])
    with pytest.warns(UserWarning, match="set_modules_to_forward_prefetch has no effect where .root. .Sequential."):
        torch.compile(model, backend="aot_eager")(torch.ones(2, 8))


def test_a_class_that_asks_something_of_its_subclasses() -> None:
    """Generated classes are none that its author meant."""
    made = []

    class Kind(nn.Linear):
        def __init_subclass__(cls, kind: str, **more: Any) -> None:
            super().__init_subclass__(**more)
            made.append(kind)

    class Mine(Kind, kind="mine"):
        pass

    model = fully_shard(nn.Sequential(fully_shard(Mine(8, 8)), Mine(8, 8)))
    assert model(torch.ones(2, 8)).shape == (2, 8) and made == ["mine"]


def test_a_full_backward_hook_makes_no_view_that_somebody_wrote() -> None:
    model = fully_shard(nn.Linear(8, 8))
    model.register_full_backward_hook(lambda module, given, got: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
