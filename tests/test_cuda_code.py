"""What Inductor generates for GPUs, looked at on a machine without one: see ``cuda_code``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fsdp_compile._torch_compat.process_groups import pretended_world
from tests.cuda_code import assembled, code_of
from tests.models import Stack, shard
from tests.recording import recorded
from tests.test_order import MODELS, TOKENS, order_of, planned_order

OFTEN = ("blocks",)


@pytest.fixture
def four_gpus() -> Iterator[None]:
    """Rank 0 of four that plan as for NCCL; the others are missing."""
    with pretended_world(4, "nccl"):
        yield


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.more if name in OFTEN else pytest.mark.slow) for name in MODELS])
def test_code_for_gpus_launches_and_waits_where_the_plan_does_and_copies_what_shares_a_bucket(name: str) -> None:
    make, inputs = MODELS[name]
    with recorded() as records:
        codes = code_of(make(), inputs, fullgraph=True)
    graphs = [one for one in records if one.stage in ("forward", "backward")]
    code = [*codes.forwards, *codes.backwards]
    planned = [planned_order(one.graph) for one in graphs]
    assert [order_of(one) for one in code] == planned and {*"GRwM"} <= {*"".join(planned)}
    for one, graph in zip(code, graphs, strict=True):
        gathered = [bucket for bucket in graph.plan.gathers if len(bucket.fqns) > 1]
        reduced = [bucket for bucket in graph.plan.reduces if len(bucket.fqns) > 1]
        body = one.split("def call", 1)[1]
        assert body.count("fsdpc.pack.default(") == len(gathered) + len(reduced)
        copies = body.count("fsdpc.copied.default(") + body.count("aten.clone.default(")
        assert copies <= sum(len(bucket.fqns) for bucket in gathered)


@pytest.mark.more
@pytest.mark.usefixtures("four_gpus")
def test_kernels_for_gpus_can_be_assembled() -> None:
    codes = code_of(shard(Stack(1, dim=64)), TOKENS, fullgraph=True)
    for code in (*codes.forwards, *codes.backwards):
        for capability in (90, 100):
            assert len(assembled(code, capability)) == len(set(re.findall(r"(\w+)\.run\(", code))) > 2
