"""Run one step eagerly and one compiled, and compare the loss and the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..api.module import set_all_reduce, set_sync
from ..core.containers import map_tensors
from ..core.unit import units_in
from .trial import module_given, require_between_steps, trial


@dataclass(frozen=True)
class Difference:
    """How one gradient, or the loss, differs between the two paths on this rank."""

    name: str  # FQN of the parameter, or "loss"
    largest: float  # absolute; inf where one side has no gradient
    eager: float  # norm
    compiled: float

    def __str__(self) -> str:
        norms = f"norms {self.eager:.6g} eager, {self.compiled:.6g} compiled"
        return f"{self.name}: differs by up to {self.largest:.3g} ({norms})"


@dataclass(frozen=True)
class Parity:
    """The result of ``check_parity`` on this rank: true when gradients were compared and nothing differs."""

    backend: str
    num_params: int  # whose gradients were compared
    differences: tuple[Difference, ...]  # the loss first, then in the order of named_parameters
    num_without: int = 0  # parameters that got no gradient either way

    def __bool__(self) -> bool:
        return self.num_params > 0 and not self.differences

    @property
    def first(self) -> Difference | None:
        """The first thing that differs; None when nothing does."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        if self.differences:
            more = len(self.differences) - 1
            text = f"eager and {self.backend} differ, first at {self.first}"
            return f"{text}, and {more} more" if more else text
        if not self.num_params:
            return (
                f"nothing to compare: none of {self.num_without} parameters gets a gradient, eagerly or by "
                f"{self.backend}; the loss is the same"
            )
        text = f"eager and {self.backend} agree: the loss and the gradients of {self.num_params} parameters"
        return f"{text}; {self.num_without} more get none" if self.num_without else text


def check_parity(
    model: nn.Module,
    /,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    backend: str = "aot_eager",
    atol: float = 0.0,
    rtol: float = 0.0,
    **named: Any,
) -> Parity:
    """Run one forward and backward eagerly and one compiled, on every rank, and compare the loss and each gradient.

    The model is called with ``inputs`` and ``named``. A batch may be given whole: a single dict is the keyword
    arguments, a single tuple the positional ones. That way the model can also get a keyword argument with a name of
    check_parity's own, ``check_parity(model, {"loss": x})``, or a dict itself, ``check_parity(model, (batch,))``.
    ``loss`` computes a scalar from the output; without it, the output is the loss or has it as ``.loss``. The default
    backend generates no code, so the numbers are equal bit by bit; give tolerances for ``backend="inductor"``.

    Call it between steps, or between two backwards of an accumulation. Gradients, gradients that were held back,
    buffers, attributes of modules, settings and random number generators are afterwards as before. The model gets
    copies of the input tensors. Post-accumulate-grad hooks (an optimizer in backward) do not run. Gradients are reduced
    before they are compared, even with synchronization off. Forward hooks and tensor hooks run as in any step.
    """
    model = module_given(model, "check_parity")
    if not units_in(model):
        raise ValueError(f"{type(model).__name__} holds no module that fully_shard was applied to. Shard it first.")
    if loss is not None and not callable(loss):
        raise TypeError(
            f"check_parity takes as loss a function of the model's output, but got {type(loss).__name__}. To call the "
            'model with a keyword argument of that name, give its inputs as a dict: check_parity(model, {"loss": ...}).'
        )
    args, kwargs = _arguments(inputs, named)
    require_between_steps(model, "check_parity")
    with torch.compiler.set_stance("force_eager"):
        eager = _step(model, model, args, kwargs, loss)
    compiled = _step(model, torch.compile(model, backend=backend), args, kwargs, loss)
    found = (_difference(name, eager[name], compiled[name], atol, rtol) for name in eager)
    num_without = sum(eager[name] is None and compiled[name] is None for name in eager)
    num_params = len(eager) - 1 - num_without
    return Parity(backend, num_params, tuple(one for one in found if one is not None), num_without)


def _arguments(inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(inputs) == 1 and not named:
        (batch,) = inputs
        if isinstance(batch, dict):
            return (), batch
        if isinstance(batch, tuple):
            return batch, {}
    return inputs, named


def _step(
    model: nn.Module, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None
) -> dict[str, Tensor | None]:
    """Run one forward and backward, and return the loss and the local gradients by name."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    with trial(model), torch.enable_grad():
        for unit in units_in(model):
            set_sync(unit, True)
            set_all_reduce(unit, True)
        args, kwargs = map_tensors((args, kwargs), copied)
        output = run(*args, **kwargs)
        scalar = _loss_of(output) if loss is None else loss(output)
        if not scalar.requires_grad:
            raise ValueError(
                f"{type(model).__name__}: the loss has no gradient, so there is nothing to compare. Is every parameter "
                "frozen, or the output detached?"
            )
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
