"""Mixed precision against a reference written by hand: cast, compute, cast the gradient, average."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile._torch_compat import autograd
from fsdp_compile.core.containers import cast_floating
from tests.comparing import assert_same_grads, batches, full, loss_of, mean_over_ranks, reference_backward
from tests.models import Stack, pair
from tests.ranks import Ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _reference(model: nn.Module, tokens: Tensor, compute: torch.dtype, reduce: torch.dtype) -> dict[str, Tensor]:
    """Each rank computes in ``compute``; its gradients travel, and are averaged, in ``reduce``."""
    total: dict[str, Tensor] = {}
    for batch in tokens:
        low = {fqn: param.detach().to(compute).requires_grad_() for fqn, param in model.named_parameters()}
        loss_of(functional_call(model, low, (batch,))).backward()
        for fqn, param in low.items():
            total[fqn] = total.get(fqn, torch.zeros((), dtype=reduce)) + param.grad.to(reduce)
    return {fqn: (grad / len(tokens)).to(FP32) for fqn, grad in total.items()}


def _run(sharded: nn.Module, path: str) -> Any:
    return sharded if path == "eager" else torch.compile(sharded, backend=path, fullgraph=True)


def _params(
    path: str, param: torch.dtype, reduce: torch.dtype | None, rtol: float, tied: bool, atol: float = 1e-6
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    unsharded, sharded = pair(make=lambda: Stack(tied=tied), mp_policy=policy)
    tokens = batches(0)
    out = _run(sharded, path)(tokens[dist.get_rank()])
    assert out.dtype is param
    loss_of(out).backward()
    # reduce_dtype=None follows the original parameter's dtype (torch 2.15), on every version.
    expected = _reference(unsharded, tokens, param, reduce or FP32)
    for fqn, ours in sharded.named_parameters():
        assert ours.dtype is FP32 and ours.grad.dtype is FP32, fqn
        torch.testing.assert_close(full(ours.grad), expected[fqn], rtol=rtol, atol=atol, msg=lambda m: f"{fqn}: {m}")  # noqa: B023


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("param", "reduce", "rtol"), [(BF16, FP32, 1e-5), (BF16, None, 1e-5), (BF16, BF16, 2e-2), (FP16, FP16, 4e-3)]
)
@pytest.mark.parametrize("path", ["eager", "aot_eager"])
def test_gradients_match_a_hand_written_reference(
    two_ranks: Ranks, path: str, param: torch.dtype, reduce: torch.dtype | None, rtol: float, tied: bool
) -> None:
    two_ranks.run(_params, path, param, reduce, rtol, tied)


@pytest.mark.more
def test_bf16_with_fp32_reduction_under_inductor(two_ranks: Ranks) -> None:
    # Inductor keeps intermediates in fp32 where eager rounds them to bf16.
    two_ranks.run(_params, "inductor", BF16, FP32, 5e-2, False, 5e-4)


def test_bf16_on_three_ranks(three_ranks: Ranks) -> None:
    three_ranks.run(_params, "aot_eager", BF16, FP32, 1e-5, True)


def _reduce_scatter_matches_all_to_all(path: str, reduce: torch.dtype) -> None:
    import fsdp_compile

    grads = []
    for reduction in ("reduce_scatter", "all_to_all"):
        _, sharded = pair(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce))
        fsdp_compile.configure(sharded, reduction=reduction)
        loss_of(_run(sharded, path)(batches(0)[dist.get_rank()])).backward()
        grads.append({fqn: full(param.grad) for fqn, param in sharded.named_parameters()})
    for fqn, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][fqn], rtol=1e-6, atol=1e-7, msg=lambda m: f"{fqn}: {m}")  # noqa: B023  # two ranks: one addition


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
def test_both_reductions_agree(two_ranks: Ranks, path: str) -> None:
    two_ranks.run(_reduce_scatter_matches_all_to_all, path, FP32)


class Recorder(nn.Module):
    """Says which dtypes reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> Tensor:
        self.seen = [x.dtype, extra["float"].dtype, extra["int"].dtype, self.table.dtype]
        return x * self.scale.to(x.dtype) * extra["float"].to(x.dtype)


def _casts(path: str, cast_inputs: bool, output: torch.dtype | None) -> list[torch.dtype]:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output, cast_forward_inputs=cast_inputs)
    module = fully_shard(Recorder(), mp_policy=policy)
    out = _run(module, path)(torch.ones(4), extra={"float": torch.ones(4), "int": torch.ones(4, dtype=torch.int64)})
    return [*module.seen, out.dtype]


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
def test_inputs_and_outputs_are_cast_and_buffers_are_not(two_ranks: Ranks, path: str) -> None:
    assert two_ranks.run(_casts, path, True, None)[0] == [BF16, BF16, torch.int64, FP32, BF16]
    assert two_ranks.run(_casts, path, True, FP32)[0] == [BF16, BF16, torch.int64, FP32, FP32]
    assert two_ranks.run(_casts, path, False, FP16)[0] == [FP32, FP32, torch.int64, FP32, FP16]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    value: Any
    name: str


def test_casting_keeps_every_container() -> None:
    t, n = torch.ones(2), torch.ones(2, dtype=torch.int32)
    nested = {
        "list": [t, n],
        "tuple": (t,),
        "point": Point(t, 1),
        "ordered": OrderedDict(a=t),
        "record": Record(t, "r"),
    }
    cast = cast_floating(nested, BF16)
    assert cast["list"][0].dtype is BF16 and cast["list"][1] is n
    assert type(cast["tuple"]) is tuple and cast["tuple"][0].dtype is BF16
    assert type(cast["point"]) is Point and cast["point"].x.dtype is BF16 and cast["point"].y == 1
    assert type(cast["ordered"]) is OrderedDict and cast["ordered"]["a"].dtype is BF16
    assert type(cast["record"]) is Record and cast["record"].value.dtype is BF16 and cast["record"].name == "r"
    assert nested["record"].value.dtype is FP32


def _override() -> list[torch.dtype]:
    seen = []

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.ones(4))
            self.high = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.low.dtype, self.high.dtype))
            return x.sum() * self.low.sum() * self.high.sum()

    policy = MixedPrecisionPolicy(
        param_dtype=BF16, param_dtype_override_fn=lambda param: FP32 if param.shape == (5,) else None
    )
    fully_shard(module := Reader(), mp_policy=policy)(torch.ones(2))
    assert module is not None
    return list(seen[0])


@pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"), reason="a word of torch 2.15's policy"
)
def test_one_parameter_may_stay_in_high_precision(two_ranks: Ranks) -> None:
    assert two_ranks.run(_override)[0] == [BF16, FP32]


class TwoDtypes(nn.Module):
    """One linear is stored in bf16, the other in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 9, dtype=BF16)
        self.high = nn.Linear(9, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.to(BF16)).float())


def _inputs(step: int) -> Tensor:
    """Every rank's in one step: [ranks, 4, 8]."""
    return torch.randn(dist.get_world_size(), 4, 8, generator=torch.Generator().manual_seed(step))


def _two_stored_dtypes(path: str) -> None:
    unsharded = TwoDtypes()
    sharded = fully_shard(copy.deepcopy(unsharded))
    run = _run(sharded, path)
    optims = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (sharded, unsharded)]
    for step in range(3):
        loss_of(run(_inputs(step)[dist.get_rank()])).backward()
        reference_backward(unsharded, _inputs(step))
        assert {fqn: param.grad.dtype for fqn, param in sharded.named_parameters()} == {
            "low.weight": BF16, "low.bias": BF16, "high.weight": FP32, "high.bias": FP32,
        }  # fmt: skip
        assert_same_grads(sharded, unsharded, atol=1e-3, rtol=2e-2)  # bf16 has two to three digits
        for optim in optims:
            optim.step()
            optim.zero_grad()


@pytest.mark.parametrize("path", ["eager", "aot_eager"])
def test_a_unit_may_store_parameters_in_two_dtypes(two_ranks: Ranks, path: str) -> None:
    two_ranks.run(_two_stored_dtypes, path)


def _asked_for(grad_dtype: torch.dtype | None, stored: torch.dtype) -> nn.Linear:
    model = nn.Linear(8, 9, dtype=stored)
    for param in model.parameters():
        param.grad_dtype = grad_dtype
    return model


def _dtype_of_gradients(path: str) -> None:
    unsharded = nn.Linear(8, 9, dtype=BF16)
    sharded = _asked_for(FP32, stored=BF16)
    sharded.load_state_dict(unsharded.state_dict())
    fully_shard(sharded)
    run = _run(sharded, path)

    def check(dtype: torch.dtype, step: int) -> None:
        """The gradients are each rank's in ``dtype``, averaged and kept in fp32."""
        sharded.zero_grad()
        reference, tokens = copy.deepcopy(unsharded).to(dtype), _inputs(step).to(dtype)
        loss_of(run(tokens[dist.get_rank()])).backward()
        expected = _reference(reference, tokens, dtype, FP32)
        for fqn, param in sharded.named_parameters():
            assert param.dtype is dtype and param.grad.dtype is FP32, fqn
            torch.testing.assert_close(full(param.grad), expected[fqn], rtol=1e-6, atol=1e-7, msg=lambda m: f"{fqn}: {m}")  # noqa: B023

    check(BF16, 0)
    state = {fqn: value.clone() for fqn, value in sharded.state_dict().items()}
    sharded.load_state_dict(state, assign=True)
    assert sharded.weight.grad_dtype is FP32
    check(BF16, 1)
    sharded.to(FP16)
    assert sharded.weight.grad_dtype is FP32 and sharded.weight.grad.dtype is FP32
    check(FP16, 2)


needs_grad_dtype = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no Tensor.grad_dtype")


@needs_grad_dtype
@pytest.mark.parametrize("path", ["eager", "aot_eager"])
def test_gradients_have_the_dtype_that_was_asked_for(two_ranks: Ranks, path: str) -> None:
    two_ranks.run(_dtype_of_gradients, path)


# Where autograd can leave them as they are, a unit that asks for it runs eagerly (test_grad_dtype.py).
PATHS_AS_PRODUCED = ["eager"] if autograd.GRADIENTS_COME_AS_PRODUCED else ["eager", "aot_eager"]


def _dtype_as_produced(path: str) -> list[torch.dtype]:
    model = _asked_for(None, stored=FP32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert model.weight.grad_dtype is None
    loss_of(_run(model, path)(_inputs(0)[dist.get_rank()])).backward()
    return [param.grad.dtype for param in model.parameters()]


@needs_grad_dtype
@pytest.mark.parametrize("path", PATHS_AS_PRODUCED)
def test_a_grad_dtype_of_none_means_as_autograd_produced_it(two_ranks: Ranks, path: str) -> None:
    assert two_ranks.run(_dtype_as_produced, path)[0] == [BF16, BF16]


def _zeros_of_no_dtype() -> None:
    model = fully_shard(_asked_for(None, stored=FP32))
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(ValueError, match=r"grad_dtype=None requires .*reduce_dtype, .* where weight is unused"):
        loss_of(model(_inputs(0)[dist.get_rank()])).backward()


@needs_grad_dtype
def test_zeros_for_unused_parameters_need_a_dtype(two_ranks: Ranks) -> None:
    two_ranks.run(_zeros_of_no_dtype)


def _losses() -> tuple[Tensor, Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    torch.manual_seed(0)
    unsharded = Stack()
    eager, compiled = copy.deepcopy(unsharded), copy.deepcopy(unsharded)
    out = []
    for model, path in ((eager, "eager"), (compiled, "aot_eager")):
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        run, optim = _run(model, path), torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            loss = loss_of(run(batches(step)[dist.get_rank()]))
            loss.backward()
            optim.step()
            optim.zero_grad()
        out.append(mean_over_ranks(loss))
    return out[0], out[1]


def test_eager_and_compiled_train_to_the_same_loss_in_bf16(two_ranks: Ranks) -> None:
    for eager, compiled in two_ranks.run(_losses):
        assert torch.equal(eager, compiled)
