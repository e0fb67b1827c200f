"""What Inductor generates for GPUs, looked at on a machine without one: see ``cuda_code``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from fsdp_compile import MixedPrecisionPolicy
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
def test_code_for_gpus_launches_and_waits_where_the_plan_does_and_copies_nothing(name: str) -> None:
    make, inputs = MODELS[name]
    with recorded() as records:
        codes = code_of(make(), inputs, fullgraph=True)
    graphs = [one for one in records if one.stage in ("forward", "backward")]
    code = [*codes.forwards, *codes.backwards]
    planned = [planned_order(one.graph) for one in graphs]
    assert [order_of(one) for one in code] == planned and {*"GRwM"} <= {*"".join(planned)}
    assert _copies("".join(code)) == []


def _copies(code: str) -> list[str]:
    """The calls that pack a bucket, or copy out of it."""
    return re.findall(r"(?:fsdpc\.pack|fsdpc\.copied|aten\.clone)\.default\(", code)


@pytest.mark.more
@pytest.mark.usefixtures("four_gpus")
def test_casts_for_the_wire_are_one_kernel_a_bucket_and_kernels_can_be_assembled() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with recorded() as records:
        codes = code_of(shard(Stack(1, dim=64), mp_policy=policy), TOKENS, fullgraph=True)
    cast = [bucket for one in records for bucket in (*one.plan.gathers, *one.plan.reduces) if len(bucket.fqns) > 1]
    assert len(_copies("".join([*codes.forwards, *codes.backwards]))) == len(cast) > 0
    for code in (*codes.forwards, *codes.backwards):
        for capability in (90, 100):
            assert len(assembled(code, capability)) == len(set(re.findall(r"(\w+)\.run\(", code))) > 2
