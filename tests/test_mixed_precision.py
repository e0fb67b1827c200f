"""Mixed precision against a reference written by hand: cast, compute, cast the gradient, average."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call

import fsdp_compile
from fsdp_compile import MixedPrecisionPolicy, fully_shard, no_sync
from fsdp_compile._torch_compat import autograd
from tests.comparing import assert_same_grads, batches, full, loss_of, reference_backward
from tests.compiling import PATHS, compiled
from tests.models import Stack, mesh_of, pair, twins
from tests.on_ranks import on_four_ranks, on_two_ranks

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


@pytest.mark.parametrize(
    ("path", "param", "reduce", "reduction", "rtol"),
    [
        ("eager", BF16, FP32, "all_to_all", 1e-5),
        ("eager", BF16, None, "reduce_scatter", 1e-5),
        ("eager", FP16, FP16, "auto", 4e-3),
        ("aot_eager", BF16, None, "reduce_scatter", 1e-5),
    ],
)
@on_two_ranks
def test_gradients_match_a_hand_written_reference(
    path: str, param: torch.dtype, reduce: torch.dtype | None, reduction: str, rtol: float
) -> None:
    """With either of the two ways to reduce."""
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    unsharded, sharded = pair(make=lambda: Stack(1, tied=True), mp_policy=policy)
    fsdp_compile.configure(sharded, reduction=reduction)
    tokens = batches(0)
    out = compiled(sharded, path)(tokens[dist.get_rank()])
    assert out.dtype is param
    loss_of(out).backward()
    # reduce_dtype=None follows the original parameter's dtype (torch 2.15), on every version.
    expected = _reference(unsharded, tokens, param, reduce or FP32)
    for fqn, ours in sharded.named_parameters():
        assert ours.dtype is FP32 and ours.grad.dtype is FP32, fqn
        torch.testing.assert_close(full(ours.grad), expected[fqn], rtol=rtol, atol=1e-6, msg=lambda m: f"{fqn}: {m}")  # noqa: B023


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


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_inputs_and_outputs_are_cast_and_buffers_are_not(path: str) -> None:
    """Without an output_dtype the output is in param_dtype: so it is in the test above."""
    for cast_inputs, output, inside in ((True, FP32, BF16), (False, FP16, FP32)):
        torch._dynamo.reset()
        policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output, cast_forward_inputs=cast_inputs)
        module = fully_shard(Recorder(), mp_policy=policy)
        extra = {"float": torch.ones(4), "int": torch.ones(4, dtype=torch.int64)}
        out = compiled(module, path)(torch.ones(4), extra=extra)
        assert [*module.seen, out.dtype] == [inside, inside, torch.int64, FP32, output]


@pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"), reason="a word of torch 2.15's policy"
)
@on_two_ranks
def test_one_parameter_may_stay_in_high_precision() -> None:
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
    fully_shard(Reader(), mp_policy=policy)(torch.ones(2))
    assert seen == [(BF16, FP32)]


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


@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_a_unit_may_store_parameters_in_two_dtypes(path: str) -> None:
    unsharded = TwoDtypes()
    sharded = fully_shard(copy.deepcopy(unsharded))
    run = compiled(sharded, path)
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


def _asked_for(grad_dtype: torch.dtype | None, stored: torch.dtype) -> nn.Linear:
    model = nn.Linear(8, 9, dtype=stored)
    for param in model.parameters():
        param.grad_dtype = grad_dtype
    return model


needs_grad_dtype = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no Tensor.grad_dtype")


@needs_grad_dtype
@pytest.mark.parametrize("path", PATHS)
@on_two_ranks
def test_gradients_have_the_dtype_that_was_asked_for(path: str) -> None:
    unsharded = nn.Linear(8, 9, dtype=BF16)
    sharded = _asked_for(FP32, stored=BF16)
    sharded.load_state_dict(unsharded.state_dict())
    fully_shard(sharded)
    run = compiled(sharded, path)

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


# Where autograd can leave them as they are, a unit that asks for it runs eagerly (test_grad_dtype.py).
PATHS_AS_PRODUCED = PATHS[:1] if autograd.GRADIENTS_COME_AS_PRODUCED else PATHS


@needs_grad_dtype
@pytest.mark.parametrize("path", PATHS_AS_PRODUCED)
@on_two_ranks
def test_a_grad_dtype_of_none_means_as_autograd_produced_it(path: str) -> None:
    model = _asked_for(None, stored=FP32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    assert model.weight.grad_dtype is None
    loss_of(compiled(model, path)(_inputs(0)[dist.get_rank()])).backward()
    assert [param.grad.dtype for param in model.parameters()] == [BF16, BF16]


# --- complex parameters


def _assert_same(sharded: nn.Module, unsharded: nn.Module, what: str) -> None:
    """Shard by shard: gloo gathers no complex numbers."""
    for (fqn, ours), (_, theirs) in zip(sharded.named_parameters(), unsharded.named_parameters()):
        shard, full = (ours, theirs) if what == "params" else (ours.grad, theirs.grad)
        assert isinstance(shard, DTensor), fqn
        expected = distribute_tensor(full.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
        torch.testing.assert_close(shard.to_local(), expected.to_local(), msg=lambda text: f"{fqn}: {text}")  # noqa: B023


class Wave(nn.Module):
    """Conjugated in forward, and cut unevenly by two ranks; a real layer beside it, in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.filter.conj() + self.shift
        return self.out((y * self.phase).abs())


def _train(backend: str | None, compiled_autograd: bool = False, replicas: bool = False) -> None:
    unsharded, sharded = twins(Wave)
    size = dist.get_world_size()
    fully_shard(sharded, mesh=mesh_of("replicate", "shard") if replicas else None)
    inputs = torch.randn(size, 4, 5, generator=torch.Generator().manual_seed(1))

    def step(x: Tensor) -> None:
        sharded(x).square().mean().backward()

    run = step if backend is None else torch.compile(step, backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, unsharded)]
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        for number in range(2):
            if number == 1:  # what is held back is complex too
                with no_sync(sharded):
                    run(inputs[dist.get_rank()])
                torch.stack([unsharded(x).square().mean() for x in inputs]).mean().backward()
            run(inputs[dist.get_rank()])
            torch.stack([unsharded(x).square().mean() for x in inputs]).mean().backward()
            _assert_same(sharded, unsharded, "grads")
            for one in optimizers:
                one.step()
                one.zero_grad()
    _assert_same(sharded, unsharded, "params")


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    ("backend", "compiled_autograd"),
    [(None, False), ("aot_eager", True)],
)
def test_complex_parameters_train_as_unsharded(two_ranks: Any, backend: str | None, compiled_autograd: bool) -> None:
    two_ranks.run(_train, backend, compiled_autograd)


@on_four_ranks
def test_replicas() -> None:
    _train("aot_eager", replicas=True)
