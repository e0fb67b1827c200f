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
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.tensor import DTensor

import fsdp_compile
from tests.comparing import train_steps
from tests.compiling import compiled
from tests.models import Stack
from tests.on_ranks import on_two_ranks

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

    def __init__(self, shard: Callable[..., Any], call: str, steps: int) -> None:
        torch.manual_seed(0)
        model = Saved()
        for layer in model.layers:
            shard(layer)
        shard(model)
        if call == "model.compile()":
            model.compile(backend="aot_eager")
        self.model = compiled(model, "aot_eager" if call == "torch.compile(model)" else None, fullgraph=False)
        self.optim = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        train_steps(self.model, self.optim, range(steps))
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
def _both(call: str, steps: int) -> tuple[Trained, Trained]:
    return tuple(Trained(one.fully_shard, call, steps) for one in (fsdp_compile, torch_fsdp))  # type: ignore[return-value]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _look(value: Any) -> Any:
    """What a state dict holds, without the numbers."""

    def look(one: Tensor) -> Any:
        placements = (one.placements, one.device_mesh.shape) if isinstance(one, DTensor) else None
        return type(one).__name__, one.dtype, tuple(one.shape), str(one.device), placements, one.requires_grad

    return pytree.tree_map_only(Tensor, look, value)


def _numbers(value: Any) -> list[Tensor]:
    return [_local(one) for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        return type(error).__name__


def _round(trained: Trained, asked: dict[str, bool]) -> dict[str, Any]:
    """What the helpers give, and what comes back when they take it, by their names."""
    model, optim, options = trained.model, trained.optim, helpers.StateDictOptions(**asked)
    inner = getattr(model, "_orig_mod", model)
    told: dict[str, Any] = {
        "get_model_state_dict": helpers.get_model_state_dict(model, options=options),
        "get_optimizer_state_dict": helpers.get_optimizer_state_dict(model, optim, options=options),
        "get_state_dict": helpers.get_state_dict(model, optim, options=options),
        "a submodule": _outcome(  # without frozen parameters torch raises, for it misses those of other modules
            lambda: helpers.get_model_state_dict(model, submodules={inner.layers[0]}, options=options)
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


def _clone(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda one: one.detach().clone(), value)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("steps", [0, 2], ids=["new", "trained"])
@pytest.mark.parametrize(
    "call", [one if one == "torch.compile(model)" else pytest.param(one, marks=pytest.mark.more) for one in CALLS]
)
@on_two_ranks
def test_the_helpers_do_what_they_do_for_fsdp2(call: str, steps: int, options: str) -> None:
    ours, theirs = (_round(trained, OPTIONS[options]) for trained in _both(call, steps))
    for name, expected in theirs.items():
        assert _look(ours[name]) == _look(expected), name
        for mine, their in zip(_numbers(ours[name]), _numbers(expected), strict=True):
            torch.testing.assert_close(mine, their, atol=1e-5, rtol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023
    if "set_model_state_dict" in ours and "frozen" not in options:
        restored = zip(ours["set_model_state_dict restores"], ours["set_optimizer_state_dict restores"], strict=True)
        assert all(any(by_either) for by_either in restored)
        assert all(ours.get("set_state_dict restores", ()))
