"""Evaluation, compiled: graphs without a backward, which Inductor reorders before the passes see them."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from tests.comparing import assert_same_grads, batches, loss_of, reference_backward
from tests.models import Block, Stack, pair
from tests.test_passes import Builder, aten, spec


def _linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def _sequential() -> None:
    torch.manual_seed(0)
    model = _linears()
    x = torch.full((2, 16), 1.0 + dist.get_rank())
    expected = model(x).detach()
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(x), expected)


@pytest.mark.compat
def test_a_model_is_evaluated_without_gradients(two_ranks: Any) -> None:
    two_ranks.run(_sequential)


def _evaluate(context: Callable[[], Any], tied: bool, atol: float, trains: bool, settings: dict[str, Any]) -> None:
    """With the parameters as they are made, and, of the same compiled model, after a step of training."""
    unsharded, sharded = pair(make=lambda: Stack(num_blocks=2, tied=tied), **settings)
    compiled = torch.compile(sharded)
    for step in range(1 + trains):
        tokens = batches(step)
        with context():
            ours, theirs = compiled(tokens[dist.get_rank()]), unsharded(tokens[dist.get_rank()])
        assert not ours.requires_grad
        torch.testing.assert_close(ours.float(), theirs, atol=atol, rtol=1e-4)
        if step < trains:
            loss_of(compiled(tokens[dist.get_rank()])).backward()
            reference_backward(unsharded, tokens)
            assert_same_grads(sharded, unsharded)
            for model in (sharded, unsharded):
                torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.more
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_model_is_evaluated_between_steps(two_ranks: Any, context: Callable[[], Any]) -> None:
    two_ranks.run(_evaluate, context, False, 1e-6, True, {})


@pytest.mark.more
@pytest.mark.parametrize(
    "settings",
    [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["bf16", "kept", "offloaded"],
)
def test_a_model_is_evaluated_with_settings(two_ranks: Any, settings: dict[str, Any]) -> None:
    two_ranks.run(_evaluate, torch.no_grad, False, 0.05 if "mp_policy" in settings else 1e-6, False, settings)


@pytest.mark.more
def test_a_model_is_evaluated_that_keeps_slices(four_ranks: Any) -> None:
    four_ranks.run(_evaluate, torch.no_grad, False, 1e-6, True, {"reshard_after_forward": 2})


@pytest.mark.more
def test_tied_weights_are_evaluated_on_uneven_shards(three_ranks: Any) -> None:
    three_ranks.run(_evaluate, torch.inference_mode, True, 1e-6, False, {})


def _frozen(which: Callable[[str], bool]) -> None:
    unsharded, sharded = pair()
    for model in (unsharded, sharded):
        for fqn, param in model.named_parameters():
            param.requires_grad_(not which(fqn))
    compiled = torch.compile(sharded)
    tokens = batches(0)
    ours, theirs = compiled(tokens[dist.get_rank()]), unsharded(tokens[dist.get_rank()])
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert ours.requires_grad == theirs.requires_grad
    if ours.requires_grad:
        loss_of(ours).backward()
        reference_backward(unsharded, tokens)
        assert_same_grads(sharded, unsharded)


def _all(fqn: str) -> bool:
    return True


def _all_but_norms(fqn: str) -> bool:
    return "norm" not in fqn


def _first_blocks(fqn: str) -> bool:
    return not fqn.startswith(("layers.1", "head"))


@pytest.mark.more
@pytest.mark.parametrize("which", [_all, _all_but_norms, _first_blocks])
def test_frozen_parameters(two_ranks: Any, which: Callable[[str], bool]) -> None:
    two_ranks.run(_frozen, which)


def _frozen_but_the_input_is_not() -> None:
    """A backward graph without a reduction."""
    torch.manual_seed(0)
    unsharded = Block()
    sharded = Block()
    sharded.load_state_dict(unsharded.state_dict())
    for module in (sharded.up, sharded.down, sharded):
        fully_shard(module)
    for model in (unsharded, sharded):
        model.requires_grad_(False)
    compiled = torch.compile(sharded)
    x, y = (torch.full((2, 16), 1.0 + dist.get_rank()).cumsum(1).requires_grad_() for _ in range(2))
    compiled(x).square().sum().backward()
    unsharded(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.more
def test_gradients_of_inputs_alone(two_ranks: Any) -> None:
    two_ranks.run(_frozen_but_the_input_is_not)


def _lengths() -> None:
    """Every rank has sequences of lengths of its own, and one of them recompiles for that."""
    unsharded, sharded = pair()
    compiled = torch.compile(sharded)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for length in (5, 7, 3, 4) if dist.get_rank() == 0 else (5, 5, 5, 5):
            tokens = torch.randint(0, 31, (2, length), generator=generator)
            torch.testing.assert_close(compiled(tokens), unsharded(tokens), atol=1e-6, rtol=1e-4)


@pytest.mark.more
def test_lengths_differ_by_rank(two_ranks: Any) -> None:
    two_ranks.run(_lengths)


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


def _generate(whole: bool) -> None:
    unsharded, sharded = _llamas()
    tokens = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(dist.get_rank()))
    settings = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = unsharded.generate(tokens, **settings)
    if whole:
        sharded.forward = torch.compile(sharded.forward)
    else:
        sharded.compile()
    assert torch.equal(sharded.generate(tokens, **settings), expected)
    with torch.no_grad():
        torch.testing.assert_close(sharded(tokens).logits, unsharded(tokens).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.more)])
def test_llama_generates(two_ranks: Any, whole: bool) -> None:
    two_ranks.run(_generate, whole)


def _generate_to_an_end(backend: str | None) -> None:
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


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=pytest.mark.more)])
def test_ranks_generate_texts_of_different_lengths(two_ranks: Any, backend: str | None) -> None:
    two_ranks.run(_generate_to_an_end, backend)


def _moved() -> None:
    with torch._inductor.config.patch(reorder_for_locality_in_training=True):
        _evaluate(torch.no_grad, False, 1e-6, True, {})


@pytest.mark.more
def test_training_graphs_may_be_reordered_too(two_ranks: Any) -> None:
    if not hasattr(torch._inductor.config, "reorder_for_locality_in_training"):
        return  # torch 2.11 has no such setting
    two_ranks.run(_moved)


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
