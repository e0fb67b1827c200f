"""Muon on sharded matrices: one rank orthogonalizes each matrix, while other ranks do so with other matrices.

    torch.optim.Muon     every rank gathers inside every Newton-Schulz step, and computes every matrix
    ours                 momentum on the shards -> exchange to the owners -> Newton-Schulz -> exchange back -> shards

The numbers are those of ``torch.optim.Muon`` on the unsharded model. It computes in bfloat16, so bfloat16 travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from .._torch_compat.optimizers import step_without_hooks
from ..core.parts import local_of
from .owners import Owners
from .updating import UpdatingOptimizer

_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
_DEFAULT_RATIO = "original"
_ALGORITHMS = ("muon", "adamw")


class Muon(UpdatingOptimizer):
    """``torch.optim.Muon`` for sharded models, with AdamW for what is no matrix.

    A group may say ``algorithm="muon"`` or ``"adamw"``. In other groups, matrices get Muon and the rest gets AdamW with
    the settings ``adamw``. Muon is for hidden layers: ``muon_groups(model)`` keeps embeddings and heads apart. A group
    that says ``"muon"`` may have parameters of three dimensions, as the weights of experts: a matrix in each row. The
    groups, and state dicts, are those of ``torch.optim.Muon`` and ``torch.optim.AdamW``.
    """

    _copied = ("_adamw",)
    _owners = Owners(())  # of all matrices

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements. Give it one.")
        for name, value in (("lr", float(lr)), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0.0:
                raise ValueError(f"{name} is {value}. It cannot be negative.")
        if (adjust_lr_fn or _DEFAULT_RATIO) not in _RATIOS:
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}. Choose one of {[*_RATIOS]}.")
        if len(ns_coefficients) != 3 or not 0 < ns_steps < 100:
            raise ValueError(
                f"ns_coefficients are {ns_coefficients} and ns_steps is {ns_steps}. Give three coefficients, and from "
                "1 to 99 steps."
            )
        if not isinstance(adamw, (Mapping, NoneType)):
            raise TypeError(f"adamw is of {type(adamw).__name__}. Give AdamW's settings, such as {{'lr': 1e-3}}.")
        self._adamw = AdamW([torch.zeros(1)], **(adamw or {}))
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one without an ``algorithm`` becomes two if it has matrices and other parameters."""
        given = param_group["params"]
        if isinstance(given, set):
            raise TypeError("A group's parameters are a set, which has no order. Give a list: ranks need one order.")
        named = [given] if isinstance(given, Tensor) else list(given)
        algorithm = param_group.get("algorithm")
        if algorithm not in (None, *_ALGORITHMS):
            raise ValueError(f"A group's algorithm is {algorithm!r}. Choose one of {_ALGORITHMS}.")
        taken = {"muon": (2, 3), "adamw": (), None: (2,)}[algorithm]
        matrices = [one for one in named if _param(one).ndim in taken]
        others = [one for one in named if _param(one).ndim not in taken]
        if algorithm == "muon" and others:
            name = others[0][0] if isinstance(others[0], tuple) else "one"
            raise ValueError(
                f"Muon takes matrices, and {name} of a group with algorithm='muon' has the shape "
                f"{tuple(_param(others[0]).shape)}. Put it into a group with algorithm='adamw'."
            )
        muon, adamw = self.defaults, self._adamw.defaults
        for params, defaults, foreign in ((matrices, muon, adamw), (others, adamw, muon)):
            if params or (not named and defaults is muon):
                super().add_param_group({**defaults, **param_group, "params": params})
                for name in ("algorithm", *(foreign.keys() - defaults.keys())):  # as torch's groups, for state dicts
                    self.param_groups[-1].pop(name, None)

    def _update(self) -> None:
        groups = [group for group in self.param_groups if "betas" not in group]
        self._update_matrices([(group, param) for group in groups for param in group["params"]])
        others = [group for group in self.param_groups if "betas" in group]
        if others:
            # One optimizer with one state: AdamW works on this one's.
            self._adamw.param_groups, self._adamw.state = others, self.state
            step_without_hooks(self._adamw)

    def _update_matrices(self, matrices: Sequence[tuple[dict[str, Any], Tensor]]) -> None:
        params = [param for _, param in matrices]
        if [*map(id, params)] != [*map(id, self._owners.params)]:
            self._owners = Owners(params, _cost)

        def compute(places: Sequence[int], wholes: Sequence[Tensor]) -> list[Tensor]:
            results = []
            for (group, _), whole in zip([matrices[place] for place in places], wholes):
                settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
                # One by one: some bits of a batched product are others than those of torch's optimizer (2.15, CPU).
                each = [orthogonalized(one, *settings) for one in whole.view(-1, *whole.shape[-2:])]
                results.append(torch.stack(each).view(whole.shape))
            return results

        directions = [self._direction(group, param) for group, param in matrices]
        for (group, param), result in zip(matrices, self._owners.run(compute, directions)):
            if result is None:
                continue
            lr = float(group["lr"])
            rows, columns = param.shape[-2:]
            local = local_of(param)
            local.mul_(1 - lr * group["weight_decay"])
            local.add_(result, alpha=-lr * _RATIOS[group["adjust_lr_fn"] or _DEFAULT_RATIO](rows, columns))

    def _direction(self, group: dict[str, Any], param: Tensor) -> Tensor | None:
        """Add the gradient to the momentum; return this rank's part of the matrix that will be orthogonalized."""
        grad = param.grad
        if grad is None:
            return None
        if grad.is_complex() or grad.is_sparse:
            raise RuntimeError(f"Muon takes dense real gradients, not one of {grad.dtype}, {grad.layout}.")
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentum, new = local_of(state["momentum_buffer"]), local_of(grad)
        momentum.lerp_(new, 1 - group["momentum"])
        return (new.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Return a matrix with singular values near one, by Newton-Schulz iteration."""
    rows, columns = matrix.shape
    a, b, c = coefficients
    wide = matrix.mT if rows > columns else matrix
    x = wide / wide.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if rows > columns else x


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the model's parameters in two groups: matrices of hidden layers, and all others for AdamW.

    Embeddings, what is tied to one, and linear layers with a row for each row of an embedding (heads) are for AdamW.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"muon_groups takes a module, but got {type(model).__name__}. Muon itself takes parameters.")
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rows = {module.num_embeddings for module in tables}
    apart = {id(param) for module in tables for param in module.parameters(recurse=False)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features in rows:
            apart.update(id(param) for param in module.parameters(recurse=False))
    named = list(model.named_parameters())
    hidden = [(name, param) for name, param in named if param.ndim == 2 and id(param) not in apart]
    names = {name for name, _ in hidden}
    others = [(name, param) for name, param in named if name not in names]
    groups = [{"params": hidden, "algorithm": "muon"}, {"params": others, "algorithm": "adamw"}]
    return [group for group in groups if group["params"]]


def _cost(size: torch.Size) -> float:
    """Return the multiplications of one iteration, all but a factor."""
    short, long = sorted(size[-2:])
    return float(size.numel() * short * (2 + short / max(long, 1)))


def _param(given: Any) -> Tensor:
    """Return the parameter of an entry, which is the parameter or a pair of its name and it."""
    return given[1] if isinstance(given, tuple) else given
