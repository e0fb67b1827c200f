"""torch.compile(model) first, then fully_shard on its layers and on the wrapper: names as torch gives them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.tensor import distribute_tensor

import fsdp_compile
from tests.comparing import assert_same_params, mine, train_and_compare
from tests.models import Stack, twins
from tests.on_ranks import on_two_ranks

small = functools.partial(Stack, 1)


def wrapped(fully_shard: Any, model: Stack) -> Any:
    whole = torch.compile(model, backend="aot_eager")
    for layer in whole.layers:
        fully_shard(layer)
    return fully_shard(whole)


@pytest.mark.compat
@on_two_ranks
def test_a_wrapped_models_names_agree() -> None:
    unsharded, model = twins(small)
    theirs = wrapped(torch_fsdp.fully_shard, copy.deepcopy(unsharded))
    model = wrapped(fsdp_compile.fully_shard, model)
    names = [f"_orig_mod.{fqn}" for fqn, _ in unsharded.named_parameters()]
    for one in (theirs, model):
        assert [fqn for fqn, _ in one.named_parameters()] == names
        assert list(one.state_dict()) == names
    train_and_compare(model, model._orig_mod, unsharded)
    # Saved and loaded by name, as RAM-efficient loading does.
    whole = {fqn: param.full_tensor() for fqn, param in model.state_dict().items()}
    fresh = wrapped(fsdp_compile.fully_shard, small())
    shards = fresh.state_dict()
    assert list(whole) == list(shards)
    placed = {
        fqn: distribute_tensor(value, shards[fqn].device_mesh, shards[fqn].placements) for fqn, value in whole.items()
    }
    fresh.load_state_dict(placed, assign=True)
    assert_same_params(fresh._orig_mod, unsharded, atol=1e-4)
    for one in (theirs, model):  # torch's helpers take the wrapper's name away
        assert list(helpers.get_model_state_dict(one)) == [fqn for fqn, _ in unsharded.named_parameters()]
    another = wrapped(fsdp_compile.fully_shard, small())
    helpers.set_model_state_dict(another, helpers.get_model_state_dict(model))
    assert_same_params(another._orig_mod, unsharded, atol=1e-4)


@on_two_ranks
def test_a_method_of_the_wrapped_model_gathers() -> None:
    model = wrapped(fsdp_compile.fully_shard, small())
    fsdp_compile.register_fsdp_forward_method(model, "forward")
    output = model._orig_mod.forward(mine())  # not through __call__
    assert output.shape == (4, 7, 31)
