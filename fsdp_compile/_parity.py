"""One step both ways: do the eager path and the compiled graph train this model alike?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._state import states_in


@dataclass(frozen=True)
class Difference:
    """Of one gradient, or of the loss, on this rank."""

    name: str  # FQN of the parameter, or "loss"
    largest: float  # absolute; inf where one side has no gradient
    eager: float  # norm
    compiled: float

    def __str__(self) -> str:
        norms = f"norms {self.eager:.6g} eager, {self.compiled:.6g} compiled"
        return f"{self.name}: differs by up to {self.largest:.3g} ({norms})"


@dataclass(frozen=True)
class Parity:
    """What ``check_parity`` saw on this rank: true when nothing differs."""

    backend: str
    num_params: int
    differences: tuple[Difference, ...]  # the loss first, then in the order of named_parameters

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first thing that differs; None when nothing does."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        if not self.differences:
            return f"eager and {self.backend} agree: the loss and the gradients of {self.num_params} parameters"
        more = len(self.differences) - 1
        text = f"eager and {self.backend} differ, first at {self.first}"
        return f"{text}, and {more} more" if more else text


def check_parity(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    backend: str = "aot_eager",
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Parity:
    """Run one forward and backward eagerly and one compiled, on every rank, and compare the loss and each gradient.

    ``batch`` is what the model is called with: a dict of keyword arguments, a tuple of arguments, or one argument.
    ``loss`` makes a scalar of the output; left out, the output is the loss or has it as ``.loss``. Gradients, buffers
    and the state of random number generators are as before afterwards. The default backend generates no code, so the
    numbers are equal bit by bit; give tolerances for ``backend="inductor"``.
    """
    model = model._orig_mod if isinstance(model, compat.OptimizedModule) else model
    if not states_in(model):
        raise ValueError(f"{type(model).__name__} holds no module that fully_shard was applied to. Shard it first.")
    args, kwargs = _arguments(batch)
    before = {fqn: param.grad for fqn, param in model.named_parameters()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            seeds = torch.random.get_rng_state()
            with torch.compiler.set_stance("force_eager"):
                eager = _step(model, model, args, kwargs, loss)
            _restore(buffers)
            torch.random.set_rng_state(seeds)
            compiled = _step(model, torch.compile(model, backend=backend), args, kwargs, loss)
    finally:
        _restore(buffers)
        for fqn, param in model.named_parameters():
            param.grad = before[fqn]
    found = (_difference(name, eager[name], compiled[name], atol, rtol) for name in eager)
    return Parity(backend, len(before), tuple(one for one in found if one is not None))


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _step(
    model: nn.Module, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None
) -> dict[str, Tensor | None]:
    """The loss and the local gradients of one forward and backward."""
    for param in model.parameters():
        param.grad = None
    output = run(*args, **kwargs)
    scalar = _loss_of(output) if loss is None else loss(output)
    scalar.backward()
    seen: dict[str, Tensor | None] = {"loss": scalar.detach()}
    for fqn, param in model.named_parameters():
        grad = param.grad
        seen[fqn] = grad.to_local() if isinstance(grad, DTensor) else grad
    return seen


def _loss_of(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ValueError(
            f"The model's output, {type(output).__name__}, is not a loss and has none as .loss. Pass check_parity a "
            "function that makes one of it: loss=lambda output: ..."
        )
    return found


def _difference(
    name: str, eager: Tensor | None, compiled: Tensor | None, atol: float, rtol: float
) -> Difference | None:
    if eager is None and compiled is None:
        return None
    norms = [0.0 if one is None else float(one.double().norm()) for one in (eager, compiled)]
    if eager is None or compiled is None:
        return Difference(name, float("inf"), *norms)
    if torch.equal(eager, compiled) or torch.allclose(eager, compiled, atol=atol, rtol=rtol, equal_nan=True):
        return None
    return Difference(name, float((eager.double() - compiled.double()).abs().max()), *norms)
