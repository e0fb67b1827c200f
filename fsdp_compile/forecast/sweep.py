"""Plan many configurations of one model on the same ranks, and find the best of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from .forecast import OPTIMIZERS, Configuration, Forecast, Hardware, Planner
from .joint import FULL, NONE, PRECISIONS
from .layers import find_run
from .target import Made, Target

_MESHES = 4


@dataclass(frozen=True)
class Weights:
    """The sizes of a whole model's parameters, as they are stored while it trains."""

    num_params: int
    stored_bytes: int
    trained_bytes: int  # of those that get gradients

    def standing_bytes(self, mesh: tuple[int, ...], hardware: Hardware) -> int:
        """Return the bytes of a rank's shards, their gradients and the optimizer's states."""
        return (self.stored_bytes + self.trained_bytes * (1 + OPTIMIZERS[hardware.optimizer].states_there)) // mesh[-1]

    def rest_bytes(self, mesh: tuple[int, ...], hardware: Hardware) -> int:
        """Return the bytes that the memory leaves to forward and backward beside the optimizer's states."""
        return hardware.memory_bytes - self.trained_bytes * OPTIMIZERS[hardware.optimizer].states_there // mesh[-1]


def weights_of(model: nn.Module, precision: str) -> Weights:
    """Return the sizes of a model that is trained in one of ``PRECISIONS``."""
    stored, _, _ = PRECISIONS[precision]
    params = list(model.parameters())
    num_bytes = {
        param: param.numel() * (param if stored is None or not param.is_floating_point() else stored).itemsize
        for param in params
    }
    return Weights(
        sum(param.numel() for param in params),
        sum(num_bytes.values()),
        sum(num_bytes[param] for param in params if param.requires_grad),
    )


@dataclass(frozen=True)
class TooLarge:
    """A configuration that was not planned: shards, gradients and optimizer states alone exceed the memory."""

    configuration: Configuration
    peak_bytes: int
    hardware: Hardware


Told = Callable[[str], None]


class Sweep:
    """Plans configurations of one model."""

    def __init__(self, target: Target, hardware: Hardware, weights: Weights, told: Told) -> None:
        self.target, self.hardware, self.weights, self._told = target, hardware, weights, told

    def plan(self, one: Configuration) -> Forecast:
        """Plan one configuration."""
        made = self.target.make(one.batch, one.sequence)
        return Planner(made, one, self.hardware, lambda what: self._told(f"{one}: {what}")).forecast()

    def sweep(self, given: Configuration) -> list[Forecast | TooLarge]:
        """Plan the configurations around the given one, and then the fastest that fits once more, within a budget."""
        found: list[Forecast | TooLarge] = []
        for one in around(given, self.hardware, self.target.make(given.batch, given.sequence)):
            least = self.weights.standing_bytes(one.mesh, self.hardware)
            found.append(TooLarge(one, least, self.hardware) if least > self.hardware.memory_bytes else self.plan(one))
        # If the fastest cannot meet a given budget, the best of those that are within it as they are can.
        first, other = _fastest(found), best_of(found, given.budget)
        for fastest in (first,) if other is first else (first, other):
            if fastest is None:
                continue
            said = fastest.configuration
            rest = self.weights.rest_bytes(said.mesh, self.hardware)
            within = self.plan(dataclasses.replace(said, budget=given.budget or rest))
            if within.is_met and _are_equal(within, fastest):
                break  # it was within the budget anyway: a second row would say the same
            found.append(within)
            if within.is_met:
                break
        return found


def around(given: Configuration, hardware: Hardware, made: Made) -> list[Configuration]:
    """Return what a sweep tries: meshes of these ranks, batches around the given one, kinds of checkpointing."""
    batches = [given.batch] if made.has_own_batch else sorted({max(given.batch // 2, 1), given.batch, 2 * given.batch})
    repeats = find_run(made.model) is not None  # else there are no layers to checkpoint
    ways = dict.fromkeys((NONE, given.checkpointing, FULL) if repeats else (given.checkpointing,))
    return [
        Configuration(mesh, batch, given.sequence, way, may=given.may)
        for mesh, batch, way in itertools.product(_meshes(given, hardware), batches, ways)
    ]


def best_of(found: Iterable[Forecast | TooLarge], budget: int | None = None) -> Forecast | None:
    """Return the forecast with most tokens a second of those that fit, and are within the budget if there is one."""
    return _fastest(one for one in found if isinstance(one, Forecast) and (budget is None or one.held_bytes <= budget))


def _fastest(found: Iterable[Forecast | TooLarge]) -> Forecast | None:
    fitting = [one for one in found if isinstance(one, Forecast) and one.fits]
    return max(fitting, key=lambda one: (one.tokens_per_s, -one.peak_bytes), default=None)


def _are_equal(one: Forecast, other: Forecast) -> bool:
    """Whether two plans of one configuration, with a budget and without, have the same memory and times."""
    figures = (one.forward_s, one.backward_s), (other.forward_s, other.backward_s)
    return one.peak == other.peak and all(map(math.isclose, *figures))


def _meshes(given: Configuration, hardware: Hardware) -> list[tuple[int, ...]]:
    """Return meshes: the given one, all ranks in one group, and groups of whole nodes, large groups first."""
    num_ranks, node = hardware.num_ranks, hardware.profile.ranks_per_node
    sizes = [size for size in range(node, num_ranks, node) if num_ranks % size == 0]
    replicated = [(num_ranks // size, size) for size in reversed(sizes)]
    return list(dict.fromkeys([given.mesh, (num_ranks,), *replicated]))[:_MESHES]
