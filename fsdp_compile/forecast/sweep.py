"""Plan many configurations of one model on the same ranks, and find the best of them.

A budget decides what stays gathered until backward: as many of the last layers as save time and fit. Where the step
does not fit even with no layer kept, the forecast computes again all that a plan within a budget may. Plans in between
(some activations saved and others not, or layers kept beside recomputation) are not tried. A model that compiles with
the budget does find them, and is faster than the forecast.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from .forecast import OPTIMIZERS, Configuration, Forecast, Hardware, Keeps, Planner, Whole, as_told, nothing
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
        states, _ = OPTIMIZERS[hardware.optimizer]
        return (self.stored_bytes + self.trained_bytes * (1 + states)) // mesh[-1]

    def rest_bytes(self, mesh: tuple[int, ...], hardware: Hardware) -> int:
        """Return the bytes that the memory leaves to forward and backward beside the optimizer's states."""
        states, _ = OPTIMIZERS[hardware.optimizer]
        return hardware.memory_bytes - self.trained_bytes * states // mesh[-1]


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
    num_bytes: int


Told = Callable[[str], None]


class Sweep:
    """Plans configurations of one model; those that differ in their budget alone are traced once."""

    def __init__(self, target: Target, hardware: Hardware, weights: Weights, told: Told) -> None:
        self.target, self.hardware, self.weights, self._told = target, hardware, weights, told
        self._planners: dict[Configuration, Planner] = {}

    def plan(self, one: Configuration) -> Forecast:
        """Plan one configuration."""
        traced = dataclasses.replace(one, budget=None)
        if traced not in self._planners:
            made = self.target.make(one.batch, one.sequence)
            self._planners[traced] = Planner(made, traced, self.hardware, lambda what: self._told(f"{one}: {what}"))
        planner = self._planners[traced]
        planner.configuration = one
        return forecast_of(planner)

    def sweep(self, given: Configuration) -> list[Forecast | TooLarge]:
        """Plan the configurations around the given one, and then the fastest that fits once more, within a budget."""
        found: list[Forecast | TooLarge] = []
        for one in around(given, self.hardware, self.target.make(given.batch, given.sequence)):
            least = self.weights.standing_bytes(one.mesh, self.hardware)
            found.append(TooLarge(one, least) if least > self.hardware.memory_bytes else self.plan(one))
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
        Configuration(mesh, batch, given.sequence, way)
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


def forecast_of(planner: Planner) -> Forecast:
    """Forecast by the budget of the planner's configuration; without one, by the settings of the units."""
    budget = planner.configuration.budget
    if budget is None:
        whole, num_traced = planner.all_alike(as_told)
        return planner.forecast(whole, 0, num_traced)
    return planner.forecast(*min(_candidates(planner, budget), key=lambda found: _rank(found, budget)))


def _rank(candidate: tuple[Whole, int, int], budget: int) -> tuple[float, ...]:
    whole, num_kept, _ = candidate
    num_bytes = sum(whole.peak())
    if num_bytes <= budget:
        return 0, whole.seconds(), num_bytes
    return 1, num_bytes, num_kept, whole.seconds()  # over the budget: fewest bytes, then fewest layers kept


def _candidates(planner: Planner, budget: int) -> list[tuple[Whole, int, int]]:
    """Return the steps to choose from, with how many periods each keeps gathered, and how many were traced."""
    found: list[tuple[Whole, int, int]] = []
    for root in (as_told, nothing):
        if any(sum(whole.peak()) <= budget for whole, *_ in found):
            break  # parameters outside of the layers are read last, so they are the first to keep
        none, num_traced = planner.all_alike(planner.keeping(0, root))
        found.append((none, 0, num_traced))
        if planner.run is None:
            continue
        every, every_traced = planner.all_alike(planner.keeping(None, root))
        found.append((every, planner.num_periods, every_traced))
        if sum(none.peak()) <= budget < sum(every.peak()):
            most = _most_that_fit(planner, root, budget)
            for num_kept in {most, most // 2}:
                whole = planner.last_kept(num_kept, root)
                if whole is not None:
                    found.append((whole, num_kept, num_traced))
    if not any(sum(whole.peak()) <= budget for whole, *_ in found):
        lean, num_traced = planner.all_alike(nothing, is_lean=True)
        found.append((lean, 0, num_traced))
    return found


def _most_that_fit(planner: Planner, root: Keeps, budget: int) -> int:
    """Find by bisection how many of the last periods may stay gathered."""
    fits, over = 0, planner.num_periods
    while over - fits > 1:
        middle = (fits + over) // 2
        whole = planner.last_kept(middle, root)
        if whole is None:  # too few are kept, or too few are not, to see what repeats
            if middle < planner.num_periods // 2:
                return fits
            over = middle
        elif sum(whole.peak()) <= budget:
            fits = middle
        else:
            over = middle
    return fits
