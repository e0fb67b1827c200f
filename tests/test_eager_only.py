"""What a graph cannot honour runs eagerly inside a compiled model, and says so once, by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.comparing import assert_same_grads, batches, loss_of, reference_backward
from tests.compiling import num_graphs
from tests.models import Stack, shard
from tests.ranks import Ranks
from tests.test_extension import Opaque


class PlainGather:
    """FSDP2's default, by its protocol."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)


class PlainReduce(PlainGather):
    def __call__(  # type: ignore[override]
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_tensor(output, input, group=group, op=op, async_op=async_op)


def _all_gather(model: Stack) -> None:
    model.layers[1].set_custom_all_gather(PlainGather())


def _reduce_scatter(model: Stack) -> None:
    model.layers[1].set_custom_reduce_scatter(PlainReduce())


def _hook(model: Stack) -> None:
    model.layers[1].set_all_reduce_hook(lambda summed: None)


def _extension(model: Stack) -> None:
    model.layers[1].down.weight = nn.Parameter(Opaque(model.layers[1].down.weight.detach()))


def _unused(model: Stack) -> None:
    model.layers[1].set_reduce_scatter_unused_params(True)


def _train(change: Callable[[Stack], None], before: bool, reason: str) -> None:
    torch.manual_seed(0)
    reference = Stack()
    model = copy.deepcopy(reference)
    if before:
        change(model)
        with torch.no_grad():
            down = reference.layers[1].down.weight
            down.copy_(down.to(torch.bfloat16))
    shard(model)
    if not before:
        change(model)
    run = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            reference_backward(reference, batches(step))
            loss_of(run(batches(step)[dist.get_rank()])).backward()
    assert_same_grads(model, reference)
    said = [str(one.message) for one in caught if "eagerly inside compiled code" in str(one.message)]
    assert len(said) == 1 and said[0].startswith(f"layers.1 (Block) runs eagerly inside compiled code: {reason}"), said
    assert num_graphs() >= 2  # what stands around it is compiled
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch._dynamo.reset()
        torch.compile(model, backend="aot_eager", fullgraph=True)(batches(0)[0])


@pytest.mark.parametrize(
    ("change", "before", "reason"),
    [
        (_all_gather, False, "set_custom_all_gather"),
        pytest.param(_reduce_scatter, False, "set_custom_reduce_scatter", marks=pytest.mark.more),
        pytest.param(_hook, False, "set_all_reduce_hook", marks=pytest.mark.more),
        (_unused, False, "set_reduce_scatter_unused_params"),
        (_extension, True, "the all-gather extension of down.weight"),
    ],
    ids=["gather", "reduce", "hook", "unused", "extension"],
)
def test_one_warning_names_the_module_and_the_reason(
    two_ranks: Ranks, change: Callable[[Stack], None], before: bool, reason: str
) -> None:
    two_ranks.run(_train, change, before, reason)


def _unheeded() -> None:
    torch.manual_seed(0)
    reference = Stack(3)
    model = shard(copy.deepcopy(reference))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    model.layers[1].set_separate_reduce_scatter_group()
    model.layers[2].set_reduce_scatter_max_input_buffers(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of(model(batches(0)[dist.get_rank()])).backward()
        assert not caught
        model.zero_grad()
        loss_of(torch.compile(model, backend="aot_eager", fullgraph=True)(batches(0)[dist.get_rank()])).backward()
    reference_backward(reference, batches(0))
    assert_same_grads(model, reference)
    said = [str(one.message).split(" has no effect where ") for one in caught if "has no effect" in str(one.message)]
    assert [setting for setting, _ in said] == [
        "set_modules_to_forward_prefetch", "set_separate_reduce_scatter_group", "set_reduce_scatter_max_input_buffers"
    ]  # fmt: skip
    assert [where.partition(" is compiled")[0] for _, where in said] == [f"layers.{n} (Block)" for n in range(3)]
    with pytest.warns(UserWarning, match="set_is_last_backward has no effect where .root. .Stack. is compiled"):
        model.set_is_last_backward(False)  # said when there are graphs already
    with pytest.warns(UserWarning, match="set_reshard_after_backward has no effect"):
        model.set_reshard_after_backward(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_reshard_after_backward(False)


def test_a_setting_for_the_eager_path_alone_says_so_when_it_is_compiled(two_ranks: Ranks) -> None:
    two_ranks.run(_unheeded)
