"""The helpers of ``torch.distributed.checkpoint.state_dict`` give and take for our models what they do for FSDP2's.

One line a combination: options of the helpers, how both models are compiled, and whether they have trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.tensor import DTensor

import fsdp_compile
from tests.comparing import batches, loss_of
from tests.compiling import compiled
from tests.models import Stack
from tests.ranks import Ranks

OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "sharded, on the CPU": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full, on rank 0": {"full_state_dict": True, "cpu_offload": True},
    "full, broadcast from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
    "without frozen parameters": {"ignore_frozen_params": True, "strict": False},
    "strict without frozen parameters": {"ignore_frozen_params": True},
    "optimizer flattened": {"flatten_optimizer_state_dict": True},
}
CALLS = ["not compiled", "torch.compile(model)", "model.compile()"]


class Saved(Stack):
    """Tied weights, a frozen bias, and buffers of which one is saved."""

    def __init__(self) -> None:
        super().__init__(1, tied=True)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("offset", torch.zeros(16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.offset
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Trained:
    """A model and its optimizer, and what their tensors are."""

    def __init__(self, shard: Callable[..., Any], call: str, steps: int, backend: str) -> None:
        torch.manual_seed(0)
        model = Saved()
        for layer in model.layers:
            shard(layer)
        shard(model)
        if call == "model.compile()":
            model.compile(backend=backend)
        self.model = compiled(model, backend if call == "torch.compile(model)" else None, fullgraph=False)
        self.optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        for step in range(steps):
            loss_of(self.model(batches(step)[dist.get_rank()])).backward()
            self.optim.step()
            self.optim.zero_grad()
        helpers.get_optimizer_state_dict(self.model, self.optim)  # which makes one where there is none
        self.before = [tensor.detach().clone() for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Those of the model and of the optimizer, which the helpers may put into another order."""
        (group,) = self.optim.param_groups
        state = [self.optim.state[param][name] for param in group["params"] for name in ("exp_avg", "exp_avg_sq", "step")]
        return [*self.model.parameters(), self.model.scale, *state]

    def disturb(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.add_(1.0)

    def is_restored(self) -> list[bool]:
        """Of each tensor; then all of them are as before."""
        same = []
        with torch.no_grad():
            for tensor, before in zip(self.tensors(), self.before, strict=True):
                same.append(torch.equal(_local(tensor), _local(before)))
                tensor.copy_(before)
        return same


@functools.cache
def _both(call: str, steps: int, backend: str) -> tuple[Trained, Trained]:
    return tuple(Trained(one.fully_shard, call, steps, backend) for one in (fsdp_compile, torch_fsdp))  # type: ignore[return-value]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _look(value: Any) -> Any:
    """What a state dict holds, without the numbers."""
    if isinstance(value, dict):
        return {key: _look(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_look(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    placements = (value.placements, value.device_mesh.shape) if isinstance(value, DTensor) else None
    return type(value).__name__, value.dtype, tuple(value.shape), str(value.device), placements, value.requires_grad


def _numbers(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [number for one in value for number in _numbers(one)]
    return [_local(value)] if isinstance(value, Tensor) else []


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        return type(error).__name__


def _round(trained: Trained, asked: dict[str, bool]) -> dict[str, Any]:
    """What the helpers give, and what comes back when they take it, by their names."""
    model, optim, options = trained.model, trained.optim, helpers.StateDictOptions(**asked)
    told: dict[str, Any] = {
        "get_model_state_dict": helpers.get_model_state_dict(model, options=options),
        "get_optimizer_state_dict": helpers.get_optimizer_state_dict(model, optim, options=options),
        "get_state_dict": helpers.get_state_dict(model, optim, options=options),
        "a submodule": _outcome(  # without frozen parameters torch raises, for it misses those of other modules
            lambda: helpers.get_model_state_dict(model, submodules={_inner(model).layers[0]}, options=options)
        ),
    }
    of_model, of_optim = told["get_state_dict"]
    if asked.get("cpu_offload") and asked.get("full_state_dict") and not asked.get("broadcast_from_rank0"):
        assert bool(of_model) == (dist.get_rank() == 0)
        return told  # other ranks have nothing to give back
    # Getters give tensors of the model and the optimizer, and some become the optimizer's that takes them.
    of_model, of_optim = _clone(of_model), _clone(of_optim)
    told = {name: _clone(one) for name, one in told.items()}
    takes = {
        "set_model_state_dict": lambda: helpers.set_model_state_dict(model, _clone(of_model), options=options),
        "set_optimizer_state_dict": lambda: helpers.set_optimizer_state_dict(
            model, optim, _clone(of_optim), options=options
        ),
        "set_state_dict": lambda: helpers.set_state_dict(
            model, optim, model_state_dict=_clone(of_model), optim_state_dict=_clone(of_optim), options=options
        ),
    }
    if asked.get("broadcast_from_rank0"):
        del takes["set_state_dict"]  # ranks with nothing raise in it, for FSDP2's models too, and rank 0 waits for them
    for name, take in takes.items():
        trained.disturb()
        told[name] = str(_outcome(take))
        told[f"{name} restores"] = trained.is_restored()
    return told


def _inner(model: Any) -> Any:
    return getattr(model, "_orig_mod", model)


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clone(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_clone(one) for one in value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _as_fsdp2s(call: str, steps: int, options: str, backend: str = "aot_eager") -> None:
    ours, theirs = (_round(trained, OPTIONS[options]) for trained in _both(call, steps, backend))
    for name, expected in theirs.items():
        assert _look(ours[name]) == _look(expected), name
        for mine, their in zip(_numbers(ours[name]), _numbers(expected), strict=True):
            torch.testing.assert_close(mine, their, atol=1e-5, rtol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023
    if "set_model_state_dict" in ours and "frozen" not in options:
        restored = zip(ours["set_model_state_dict restores"], ours["set_optimizer_state_dict restores"], strict=True)
        assert all(any(by_either) for by_either in restored)
        assert all(ours.get("set_state_dict restores", ()))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("steps", [0, 2], ids=["new", "trained"])
@pytest.mark.parametrize(
    "call", [one if one == "torch.compile(model)" else pytest.param(one, marks=pytest.mark.more) for one in CALLS]
)
def test_the_helpers_do_what_they_do_for_fsdp2(two_ranks: Ranks, call: str, steps: int, options: str) -> None:
    two_ranks.run(_as_fsdp2s, call, steps, options)


@pytest.mark.more
@pytest.mark.parametrize("options", ["sharded", "full, broadcast from rank 0"])
def test_the_same_with_inductor(two_ranks: Ranks, options: str) -> None:
    two_ranks.run(_as_fsdp2s, "torch.compile(model)", 1, options, "passes")
