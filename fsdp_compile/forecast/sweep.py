"""Many configurations of one model on the same ranks, and the best of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .choose import forecast_of
from .forecast import OPTIMIZERS, Configuration, Forecast, Hardware, Planner
from .joint import FULL, NONE, PRECISIONS
from .target import Target

_MESHES = 4


@dataclass(frozen=True)
class TooLarge:
    """A configuration that was not planned: what stands between steps is more than there is."""

    configuration: Configuration
    num_bytes: int


Told = Callable[[str], None]


def plan_all(
    target: Target, configurations: Sequence[Configuration], hardware: Hardware, num_params: int, told: Told
) -> list[Forecast | TooLarge]:
    """Forecasts in the order of the configurations; those that differ in their budget alone are traced once."""
    found: list[Forecast | TooLarge] = []
    for _, alike in itertools.groupby(configurations, key=lambda one: dataclasses.replace(one, budget=None)):
        planner: Planner | None = None
        for one in alike:
            least = standing_bytes(num_params, one, hardware)
            if least > hardware.memory_bytes and len(configurations) > 1:
                found.append(TooLarge(one, least))
                continue

            def tell(what: str, said: str = str(one)) -> None:
                told(f"{said}: {what}")

            if planner is None:
                planner = Planner(target.make(one.batch, one.sequence), one, hardware, tell)
            planner.configuration = one
            found.append(forecast_of(planner))
    return found


def standing_bytes(num_params: int, configuration: Configuration, hardware: Hardware) -> int:
    """Shards, their gradients and the optimizer's states, of a model that is trained whole."""
    states, _ = OPTIMIZERS[hardware.optimizer]
    return num_params * _itemsize(hardware) * (2 + states) // configuration.mesh[-1]


def _itemsize(hardware: Hardware) -> int:
    """Of a stored parameter; where the model says, taken to be of 32 bits."""
    stored, _, _ = PRECISIONS[hardware.precision]
    return 4 if stored is None else stored.itemsize


def rest_bytes(num_params: int, mesh: tuple[int, ...], hardware: Hardware) -> int:
    """What the memory leaves to forward and backward beside the optimizer's states."""
    states, _ = OPTIMIZERS[hardware.optimizer]
    return hardware.memory_bytes - num_params * _itemsize(hardware) * states // mesh[-1]


def around(given: Configuration, hardware: Hardware, takes_sizes: bool, num_params: int) -> list[Configuration]:
    """What a sweep tries: meshes of these ranks, batches around the one given, with checkpointing and without.

    Each as units are told, and within a budget: the one given, or what the memory leaves.
    """
    batches = sorted({max(given.batch // 2, 1), given.batch, 2 * given.batch}) if takes_sizes else [given.batch]
    ways = dict.fromkeys((NONE, given.checkpointing, FULL))
    return [
        Configuration(mesh, batch, given.sequence, way, budget)
        for mesh, batch, way in itertools.product(_meshes(given, hardware), batches, ways)
        for budget in (None, rest_bytes(num_params, mesh, hardware) if given.budget is None else given.budget)
    ]


def best_of(found: Iterable[Forecast | TooLarge]) -> Forecast | None:
    """The most tokens a second of those that fit."""
    fitting = [one for one in found if isinstance(one, Forecast) and one.fits]
    return max(fitting, key=lambda one: (one.tokens_per_s, -one.peak_bytes), default=None)


def _meshes(given: Configuration, hardware: Hardware) -> list[tuple[int, ...]]:
    """The given one, all ranks in one group, and groups of whole nodes, large ones first."""
    num_ranks, node = hardware.num_ranks, hardware.profile.ranks_per_node
    sizes = [size for size in range(node, num_ranks, node) if num_ranks % size == 0]
    replicated = [(num_ranks // size, size) for size in reversed(sizes)]
    return list(dict.fromkeys([given.mesh, (num_ranks,), *replicated]))[:_MESHES]
