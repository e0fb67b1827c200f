"""Evaluation: texts that ranks generate, and graphs without a backward, which Inductor reorders before the passes see them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import fully_shard
from fsdp_compile.passes import Plan
from fsdp_compile.passes.apply.check import check
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.apply.overlap import overlap
from fsdp_compile.passes.schedule.planner import plan_graph
from tests.on_ranks import on_two_ranks
from tests.test_passes import Builder, aten, spec


@on_two_ranks
def test_ranks_generate_texts_of_different_lengths() -> None:
    """One rank's text ends before the other's: transformers runs its forwards on where it knows that others wait."""
    from tests import test_hugging_face

    unsharded = test_hugging_face.made("llama")
    sharded = test_hugging_face.sharded(copy.deepcopy(unsharded), "llama")
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(3, 37, (1, 6), generator=generator)
    settings: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=True)
    end = unsharded.generate(tokens, eos_token_id=None, **settings)[:, 7].clone()
    dist.broadcast(end, 0)
    expected = unsharded.generate(tokens, eos_token_id=end.item(), **settings)
    lengths: list[Any] = [None, None]
    dist.all_gather_object(lengths, expected.shape[1])
    assert lengths[0] == 8 < lengths[1]
    for _ in range(2):
        assert torch.equal(sharded.generate(tokens, eos_token_id=end.item(), **settings), expected)


@on_two_ranks
@pytest.mark.filterwarnings("ignore:.*returned a view tensor")  # dropout of nothing
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.more)])
def test_generate_calls_an_encoder_that_is_no_unit(compiles: bool) -> None:
    """The encoder reads the table of the root, outside of the root's forward; with one text and with beams."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0
    )
    unsharded = T5ForConditionalGeneration(config)
    sharded = copy.deepcopy(unsharded)
    for block in (*sharded.encoder.block, *sharded.decoder.block):
        fully_shard(block)
    fully_shard(sharded)
    if compiles:
        sharded.compile(backend="aot_eager")
    texts = torch.randint(3, 64, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    tokens = texts[dist.get_rank()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (unsharded, sharded)]
    for _ in range(1 if compiles else 2):  # it generates with the weights of the last step
        torch.stack([unsharded(input_ids=one, labels=one).loss for one in texts]).mean().backward()
        sharded(input_ids=tokens, labels=tokens).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for beams in (3,) if compiles else (1, 3):
            expected, found = (
                model.generate(input_ids=tokens, max_new_tokens=2 if compiles else 4, do_sample=False, num_beams=beams)
                for model in (unsharded, sharded)
            )
            assert torch.equal(found, expected)


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
