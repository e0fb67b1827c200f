"""What is written to parameters and gradients, or put in their places, is trained; what cannot be raises with a name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile import full_params, fully_shard
from tests.comparing import assert_same_grads, full
from tests.compiling import compiled, num_graphs
from tests.fsdp1_scripts import OURS, silenced
from tests.models import twins
from tests.on_ranks import on_two_ranks


def two_linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def whole(model: nn.Module, name: str = "0.weight") -> Any:
    return dict(model.named_parameters())[name]


@pytest.mark.parametrize(
    ("backend", "reshard"), [(None, True), (None, False), (None, None), ("aot_eager", None), ("aot_eager", True)]
)
@on_two_ranks
def test_data_that_is_set_is_what_is_trained(backend: str | None, reshard: bool | None) -> None:
    """torch gives ``dtensor.data = other`` the other one's shape, and keeps the values that it had.

    ``reshard=None``: FSDP1's wrapper with NO_SHARD, where what is gathered is the shard itself.
    """
    unsharded, model = two_linears(), two_linears()
    if reshard is None:
        with silenced():
            model = OURS(model, process_group=torch.distributed.new_group([torch.distributed.get_rank()]))
    else:
        fully_shard(model, reshard_after_forward=reshard)
    run = compiled(model, backend, fullgraph=False)
    x, models = torch.randn(3, 4), (model, unsharded)

    def both(write: Any) -> None:
        for one in models:
            for param in one.parameters():
                write(param)

    def check() -> None:
        run(x).sum().backward()
        unsharded(x).sum().backward()
        for ours, theirs in zip(model.parameters(), unsharded.parameters()):
            torch.testing.assert_close(full(ours), theirs)
        assert_same_grads(model, unsharded)
        torch.testing.assert_close(run(x), unsharded(x))
        both(clear)

    def clear(param: Any) -> None:
        param.grad = None

    def double(param: Any) -> None:
        param.data = param.detach() * 2

    check()
    kept = [[param.data for param in one.parameters()] for one in models]  # as an average of weights is swapped in
    both(double)
    graphs = num_graphs()
    check()
    for call in (run, unsharded):
        call(x).sum().backward()
    for one in models:
        for param in one.parameters():
            param.grad.data = param.grad * 3  # type: ignore[union-attr]
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    both(clear)
    check()
    for one, values in zip(models, kept):
        for param, value in zip(one.parameters(), values):
            param.data = value
    check()
    if reshard is not None:
        replicas = full(whole(model)).detach() * 5
        whole(unsharded).data = replicas
        whole(model).data = distribute_tensor(replicas, whole(model).device_mesh, [Replicate()])  # is cut
        check()
    assert num_graphs() == graphs
    before = full(whole(model)).clone()
    for param in copy.deepcopy(model).parameters():
        double(param)
    assert torch.equal(full(whole(model)), before)


@on_two_ranks
def test_data_that_does_not_fit_is_refused() -> None:
    model = fully_shard(two_linears())
    mesh, before = whole(model).device_mesh, full(whole(model)).clone()
    for other, says in (
        (torch.ones(6, 4), r"0\.weight is a DTensor .* set to a Tensor of shape \(6, 4\) .* distribute_tensor"),
        (distribute_tensor(torch.ones(6, 5), mesh, [Shard(0)]), "Cannot writeback when the parameter shape changes"),
        (distribute_tensor(torch.ones(6, 4).double(), mesh, [Shard(0)]), r"0\.weight .*float64.* model\.to"),
    ):
        with pytest.raises(RuntimeError, match=says):
            whole(model).data = other
    assert torch.equal(full(whole(model)), before) and whole(model).shape == (6, 4)
    model(torch.ones(3, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"a DTensor of shape \(6, 4\) .* set to a Tensor"):
        whole(model).grad.data = torch.ones(6, 4)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@on_two_ranks
def test_a_parameter_that_each_rank_would_train_alone_is_refused(backend: str | None) -> None:
    x = torch.ones(3, 4)

    def run(model: nn.Module) -> Tensor:
        torch._dynamo.reset()
        return compiled(model, backend, fullgraph=False)(x)

    says = r"0\.weight: Cannot writeback when the parameter shape changes.* a DTensor of shape \(6, 4\)"
    for put in (torch.ones(6, 4), torch.ones(7, 5)):
        model = fully_shard(two_linears())
        run(model)
        shard = whole(model)
        model[0].weight = nn.Parameter(put)
        with pytest.raises(RuntimeError, match=says):
            run(model)
        with pytest.raises(RuntimeError, match=says), full_params(model):
            pass
        model[0].weight = shard
        run(model).sum().backward()
        assert shard.grad is not None
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    fully_shard(tied)
    tied[1].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(RuntimeError, match=r"0\.weight: Cannot writeback"):
        run(tied)
    # One cut alike is taken, in its own dtype.
    low = two_linears().to(torch.bfloat16)
    fully_shard(low)
    for module in low:
        for name, param in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(param.detach().float()))
    assert run(low).dtype == torch.float32
    # No rank shares this one out: the values are taken, by the parameter that an optimizer may know.
    alone = fully_shard(two_linears(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    shard = whole(alone)
    alone[0].weight = nn.Parameter(torch.ones(6, 4))
    assert whole(alone) is shard and torch.equal(full(shard), torch.ones(6, 4))
    assert isinstance(shard, DTensor)
    run(alone).sum().backward()
    assert shard.grad is not None


class Merging(nn.Module):
    """Adds to its weight for the length of a forward, as PEFT's LoRA on nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.weight.requires_grad_(False)
        self.delta = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        merged = self.inner.weight.data.detach() + self.delta.weight
        del self.inner.weight
        self.inner.weight = merged
        if fails:
            raise KeyError("in between")
        result = self.inner(x)
        before = self.inner.weight.data - self.delta.weight.data
        del self.inner.weight
        self.inner.register_parameter("weight", nn.Parameter(before, requires_grad=False))
        return result


@on_two_ranks
def test_what_a_forward_puts_over_a_weight_goes_when_it_ends() -> None:
    """Eagerly: Dynamo of torch 2.11 to 2.15 loses the parameter of an unsharded module that does this."""
    unsharded, model = twins(lambda: nn.Sequential(Merging(), nn.Linear(4, 4)))
    fully_shard(model[0])
    fully_shard(model)
    shard, x = model[0].inner.weight, torch.randn(3, 4)
    for step in range(2):
        model(x).sum().backward()
        unsharded(x).sum().backward()
        assert model[0].inner.weight is shard, step
        assert_same_grads(model, unsharded)
    with pytest.raises(KeyError):
        model[0](x, True)
    assert model[0].inner.weight is shard
    with pytest.raises(RuntimeError, match=r"inner\.weight is sharded: it cannot become a Tensor"):
        del model[0].inner.weight
        model[0].inner.weight = torch.ones(4, 4)
