"""What Inductor generates for GPUs, looked at on a machine without one: see ``cuda_code``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch._inductor

from fsdp_compile import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp_compile._torch_compat.process_groups import pretended_world
from fsdp_compile.passes.wire.copies import is_copy
from tests.cuda_code import assembled, code_of
from tests.models import Stack, shard
from tests.recording import recorded
from tests.test_activations_away import TOKENS as LONG
from tests.test_activations_away import offload
from tests.test_order import MODELS, TOKENS, order_of, planned_order


@pytest.fixture
def four_gpus() -> Iterator[None]:
    """Rank 0 of four that plan as for NCCL; the others are missing."""
    with pretended_world(4, "nccl"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.more
@pytest.mark.usefixtures("four_gpus")
def test_offloaded_shards_are_copied_by_their_launch_and_gradients_are_not_written_over_while_they_are() -> None:
    with recorded() as records:
        codes = code_of(shard(Stack(2, dim=64), offload_policy=CPUOffloadPolicy()), TOKENS, fullgraph=True)
    (forward,), (backward,) = codes.forwards, codes.backwards
    assert [order_of(code) for code in (forward, backward)] == [planned_order(one.graph) for one in records[-2:]]
    assert forward.count("fsdpc.gather_offloaded.default(") == 4 and "fsdpc.to_device" not in forward + backward
    sent = re.findall(r"fsdpc\.to_host\.default\((\w+), \w+, wait=False\)", backward)
    assert len(sent) == 3 and all(f"del {buffer}\n" in backward for buffer in sent)
    assert not any(re.search(rf"= (reinterpret_tensor\()?{buffer}\b.*# reuse", backward) for buffer in sent)
    assert re.search(r"fsdpc\.wait_for_copies\.default\(.*\n(.*\n)*? *return ", backward)


@pytest.mark.more
@pytest.mark.usefixtures("four_gpus")
def test_a_cuda_graph_has_no_op_that_must_run_on_the_cpu_in_each_step() -> None:
    """Ranks are compared by ``begin``; what micro-batches held back is added by ``resume``."""
    model = shard(Stack(1, dim=64))
    model.set_requires_gradient_sync(False)
    model(TOKENS).sum().backward()
    model.set_requires_gradient_sync(True)
    codes = code_of(model, TOKENS, fullgraph=True, options=torch._inductor.list_mode_options("reduce-overhead"))
    for code, op in ((codes.forwards[0], "begin"), (codes.backwards[0], "resume")):
        captured, called = code.split("class Runner")
        assert "def partition_0(" in captured and f"fsdpc.{op}.default(" in called
        assert not re.search(r"fsdpc\.(begin|resume)\.default\(", captured.split("def partition_0(")[1])


@pytest.mark.more
@pytest.mark.usefixtures("four_gpus")
def test_activations_are_copied_beside_compute_and_nothing_is_written_over_them() -> None:
    """Of blocks whose collectives the code launches and waits for where the plan does."""
    model = shard(Stack(3, dim=64))
    offload(model)
    with recorded() as records:
        codes = code_of(model, LONG, fullgraph=True)
    graphs = [one.graph for one in records if one.stage in ("forward", "backward")]
    code = [*codes.forwards, *codes.backwards]
    planned = [planned_order(one) for one in graphs]
    assert [order_of(one) for one in code] == planned and {*"GRwM"} <= {*"".join(planned)}
    for one, graph, op in zip(code, graphs, ("launch_to_host", "launch_to_device")):
        launched = re.findall(rf"(\w+) = torch\.ops\.fsdpc\.{op}\.default\((\w+)", one)
        assert len(launched) == sum(is_copy(node) for node in graph.nodes) >= 5
        for made, read in launched:
            between = one[one.index(f"{made} = torch") : one.index(f"wait_tensor.default({made})")].split("\n", 1)[1]
            assert not re.search(rf"del {read}\b|\b{read}\b.*# reuse", between)
            used = [line for line in between.splitlines() if re.search(rf"\b{made}\b", line) and "assert_" not in line]
            assert used == []
        assert f"fsdpc.to_{'host' if op == 'launch_to_host' else 'device'}" not in one
    assert _copies("".join(code)) == []
