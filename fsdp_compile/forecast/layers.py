"""Find the layers of a model that repeat, and make the model with fewer of them.

    embed | dense | moe moe moe moe moe moe | head       run: 6 layers of period 1, in "layers" from 1 on
    embed | s s f s s f s s f s s f         | head       run: 4 times s s f

Two layers are equal if their classes, parameters, buffers and settings are, except for settings that count the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_LONGEST_PERIOD = 8
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers that repeat with a period."""

    path: str  # of the list that they are in
    first: int  # place of the first of them in that list
    period: int
    times: int  # how many periods there are

    def layers(self, turn: int) -> range:
        """Return the places of one period's layers."""
        begin = self.first + turn * self.period
        return range(begin, begin + self.period)


def find_run(model: nn.Module) -> LayerRun | None:
    """Return the run with most parameters; None where nothing repeats."""
    best, most = None, 0
    for path, module in model.named_modules():
        children = list(module.children())
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) or len(children) < 2:
            continue
        run = _longest(path, _signatures(children))
        covered = 0 if run is None else run.times * sum(_numel(children[place]) for place in run.layers(0))
        if covered > most:
            best, most = run, covered
    return best


def with_fewer(model: nn.Module, run: LayerRun, times: int) -> nn.Module:
    """Return a copy of the model whose run has ``times`` periods; periods in the middle are left out."""
    holder = model.get_submodule(run.path)
    children = dict(holder.named_children())
    begin = run.first + ((times + 1) // 2) * run.period
    left_out = range(begin, begin + (run.times - times) * run.period)
    kept = [(name, child) for place, (name, child) in enumerate(children.items()) if place not in left_out]
    if all(name.isdecimal() for name in children):
        kept = [(str(place), child) for place, (_, child) in enumerate(kept)]
    fewer = copy.copy(holder)
    fewer._modules = dict(kept)
    if not run.path:
        return copy.deepcopy(fewer)
    above, _, name = run.path.rpartition(".")
    parent = model.get_submodule(above)
    setattr(parent, name, fewer)
    try:
        return copy.deepcopy(model)
    finally:
        setattr(parent, name, holder)


def _signatures(layers: list[nn.Module]) -> list[Any]:
    settings = [dict(_settings(layer)) for layer in layers]
    counting = {
        key
        for key, value in settings[0].items()
        if type(value) is int
        and all(type(one.get(key)) is int and one[key] - value == place for place, one in enumerate(settings))
    }
    return [
        (_tensors(layer), {key: value for key, value in its.items() if key not in counting})
        for layer, its in zip(layers, settings)
    ]


def _settings(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, module in layer.named_modules():
        yield (path, "class"), type(module)
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN) and name != "training":
                yield (path, name), value


def _tensors(layer: nn.Module) -> list[Any]:
    named = [*layer.named_parameters(), *layer.named_buffers()]
    return [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in named]


def _longest(path: str, signatures: list[Any]) -> LayerRun | None:
    """Return the longest run of at least two periods; of runs of that length, the one with the shortest period."""
    best = None
    for period in range(1, min(_LONGEST_PERIOD, len(signatures) // 2) + 1):
        first = 0
        while first + 2 * period <= len(signatures):
            end = first + period
            while end < len(signatures) and signatures[end] == signatures[end - period]:
                end += 1
            times = (end - first) // period
            if times > 1 and (best is None or times * period > best.times * best.period):
                best = LayerRun(path, first, period, times)
            first = max(first + 1, end - period + 1)
    return best


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
