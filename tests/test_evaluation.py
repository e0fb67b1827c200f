"""Evaluation, compiled: graphs without a backward, which Inductor reorders before the passes see them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp_compile.passes import Plan
from fsdp_compile.passes.apply.check import check
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.apply.overlap import overlap
from fsdp_compile.passes.schedule.planner import plan_graph
from tests.comparing import assert_same_grads, batches, loss_of, mine, reference_backward
from tests.models import pair
from tests.on_ranks import on_two_ranks
from tests.test_passes import Builder, aten, spec


@pytest.mark.compat
@on_two_ranks
def test_a_model_is_evaluated_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    x = torch.full((2, 16), 1.0 + dist.get_rank())
    expected = model(x).detach()
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(x), expected)


def _evaluate(atol: float, settings: dict[str, Any]) -> None:
    """With the parameters as they are made, and, without settings, after a step of the same compiled model."""
    unsharded, sharded = pair(**settings)
    compiled = torch.compile(sharded)
    for step in range(2):
        with torch.no_grad():
            ours, theirs = compiled(mine(step)), unsharded(mine(step))
        assert not ours.requires_grad
        torch.testing.assert_close(ours.float(), theirs, atol=atol, rtol=1e-4)
        if settings:
            return
        loss_of(compiled(mine(step))).backward()
        reference_backward(unsharded, batches(step))
        assert_same_grads(sharded, unsharded)
        for model in (sharded, unsharded):
            torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "atol"),
    [
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 0.05),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1e-6),
    ],
    ids=["bf16", "offloaded"],
)
def test_a_model_is_evaluated_with_settings(two_ranks: Any, settings: dict[str, Any], atol: float) -> None:
    two_ranks.run(_evaluate, atol, settings)


def _moved() -> None:
    with torch._inductor.config.patch(reorder_for_locality_in_training=True):
        _evaluate(1e-6, {})


@pytest.mark.slow
def test_training_graphs_may_be_reordered_too(two_ranks: Any) -> None:
    if not hasattr(torch._inductor.config, "reorder_for_locality_in_training"):
        return  # torch 2.11 has no such setting
    two_ranks.run(_moved)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [(), ("layers.1", "head")])
@on_two_ranks
def test_frozen_parameters(trained: tuple[str, ...]) -> None:
    unsharded, sharded = pair()
    for model in (unsharded, sharded):
        for fqn, param in model.named_parameters():
            param.requires_grad_(fqn.startswith(trained))
    compiled = torch.compile(sharded)
    ours, theirs = compiled(mine()), unsharded(mine())
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert ours.requires_grad == theirs.requires_grad == bool(trained)
    if trained:
        loss_of(ours).backward()
        reference_backward(unsharded, batches(0))
        assert_same_grads(sharded, unsharded)


def _llamas() -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    unsharded = LlamaForCausalLM(config).eval()
    sharded = copy.deepcopy(unsharded)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    return unsharded, sharded


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=pytest.mark.slow)])
@on_two_ranks
def test_ranks_generate_texts_of_different_lengths(backend: str | None) -> None:
    """One rank's text ends before the other's: transformers runs its forwards on where it knows that others wait."""
    unsharded, sharded = _llamas()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(3, 64, (1, 6), generator=generator)
    settings: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    end = unsharded.generate(tokens, eos_token_id=None, **settings)[:, 7].clone()
    dist.broadcast(end, 0)
    expected = unsharded.generate(tokens, eos_token_id=end.item(), **settings)
    lengths: list[Any] = [None, None]
    dist.all_gather_object(lengths, expected.shape[1])
    assert lengths[0] == 8 < lengths[1]
    if backend is not None:
        sharded.forward = torch.compile(sharded.forward, backend=backend, dynamic=True)
    for _ in range(2):
        assert torch.equal(sharded.generate(tokens, eos_token_id=end.item(), **settings), expected)


def test_a_plan_does_not_depend_on_where_markers_stand() -> None:
    def plan_of(*order: str) -> Plan:
        b = Builder()
        x = b.input("x", 2, 4)
        shards = {
            name: b.input(f"{name}_shard", 2, *((4,) if name[0] == "w" else ())) for name in ("w0", "b0", "w1", "b1")
        }
        read: dict[str, Any] = {}

        def gather(name: str) -> None:
            its_spec = spec(
                {"w": "weight", "b": "bias"}[name[0]], (4, 4) if name[0] == "w" else (4,), order="wb".index(name[0])
            )
            read[name] = b.unshard(shards[name], its_spec, reader=name[1])

        def linear(value: Any, unit: str) -> Any:
            return b.call(aten.addmm.default, read["b" + unit], value, b.call(aten.t.default, read["w" + unit]))

        y: Any = x
        for step in order:
            if step in shards:
                gather(step)
            else:
                y = linear(y, step)
        graph = b.output(y)
        plan = plan_graph(graph, "inference")
        insert(graph, plan)
        overlap(graph, plan)
        check(graph, plan)
        return plan

    plan = plan_of("w0", "b0", "0", "w1", "b1", "1")
    assert [bucket.fqns for bucket in plan.gathers] == [("0.weight", "0.bias"), ("1.weight", "1.bias")]
    assert plan_of("b1", "b0", "w0", "0", "w1", "1") == plan
    assert plan_of("w1", "b1", "b0", "w0", "0", "1") == plan
