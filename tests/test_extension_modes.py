"""All-gather extensions in every way of training: eager, in a graph, and with our passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import fully_shard
from tests.comparing import assert_same_grads, batches, loss_of, reference_backward
from tests.compiling import compiled, num_graphs
from tests.models import Checkpointed, Stack
from tests.ranks import Ranks
from tests.test_extension_storages import Plain


class Scaled(Plain):
    """Sent with a factor that the shard holds, and its user sets between steps: as float8's scale of torchao.

    Its halves are as careless as torchao's: one looks at the data of the factor, the other forgets it.
    """

    factor: Tensor | None = None

    def __tensor_flatten__(self) -> tuple[list[str], type]:  # type: ignore[override]
        return ["inner", "factor"] if self.factor else ["inner"], type(self)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        factor = torch.ones(()) if self.factor is None else self.factor
        return (self.inner * factor,), None


def _train(kind: str, backend: str | None) -> None:
    torch.manual_seed(0)
    reference = {"checkpointed": Checkpointed}.get(kind, Stack)(tied=kind == "tied")
    model = copy.deepcopy(reference)
    if kind == "tied":
        model.head.weight = model.embed.weight = nn.Parameter(Plain(model.embed.weight.detach()))
    for layer in model.layers:
        for linear in (layer.up, layer.down):
            linear.weight = nn.Parameter(Plain(linear.weight.detach()))
    for one in (model, reference):
        if kind == "frozen":
            for layer in one.layers:
                layer.down.weight.requires_grad_(False)
    world = dist.get_world_size()
    settings = {}
    if kind == "replicas":
        settings["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    run = compiled(model, backend)
    optims = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in (model, reference)]
    for step in range(4):
        last = kind != "held back" or step % 2 == 1
        model.set_requires_gradient_sync(last)
        inputs = batches(step)
        loss_of(run(inputs[dist.get_rank()])).backward()
        reference_backward(reference, inputs)
        if not last:
            continue
        assert_same_grads(model, reference)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        if kind == "frozen" and step == 1:  # and thawed, and frozen elsewhere
            for one in (model, reference):
                one.layers[0].down.weight.requires_grad_(True)
                one.layers[0].up.weight.requires_grad_(False)


KINDS = ["plain", "held back", "checkpointed", "frozen", "tied"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("passes", marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", KINDS)
def test_trains_like_the_unsharded_model(two_ranks: Ranks, kind: str, backend: str) -> None:
    two_ranks.run(_train, kind, backend)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_trains_eagerly_like_the_unsharded_model(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(_train, kind, None)


@pytest.mark.more
@pytest.mark.parametrize("backend", [None, "aot_eager", "passes"])
def test_trains_over_replicas(four_ranks: Ranks, backend: str | None) -> None:
    four_ranks.run(_train, "replicas", backend)


def _factors(backend: str | None) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    weight = layer.weight.detach().clone()
    layer.weight = nn.Parameter(Scaled(layer.weight.detach()))
    fully_shard(layer, reshard_after_forward=True)
    run = compiled(layer, backend)
    x = torch.randn(3, 8)
    for factor in (None, 2.0, 3.0, None, 4.0):
        layer.weight._local_tensor.factor = None if factor is None else torch.tensor(factor)
        given = x.clone().requires_grad_()
        out = run(given)
        torch.testing.assert_close(out, x @ weight.T * (factor or 1.0))
        out.sum().backward()
        torch.testing.assert_close(given.grad, weight.sum(0).expand(3, 8) * (factor or 1.0))
        grad = layer.weight.grad.full_tensor()
        mean = x.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(grad, (mean / dist.get_world_size()).sum(0).expand(8, 8))
        layer.weight.grad = None
    if backend is not None:
        assert num_graphs() == 2


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("passes", marks=pytest.mark.more)])
def test_what_a_shard_holds_beside_its_weight_is_that_of_the_step(two_ranks: Ranks, backend: str | None) -> None:
    two_ranks.run(_factors, backend)


def _parity() -> None:
    torch.manual_seed(0)
    model = Stack()
    for layer in model.layers:
        layer.down.weight = nn.Parameter(Plain(layer.down.weight.detach()))
        fully_shard(layer)
    fully_shard(model)
    assert fsdp_compile.check_parity(model, batches(0)[dist.get_rank()], loss=loss_of)


def test_both_paths_agree(two_ranks: Ranks) -> None:
    two_ranks.run(_parity)
