"""What a step launches: by the schedule, from how a copy that is not sharded uses its parameters; and as it ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fsdp_compile.core.spec import spec_of
from fsdp_compile.core.unit import names_in, paths_in, units_in
from fsdp_compile.passes import Plan
from fsdp_compile.passes.schedule.schedule import launches
from fsdp_compile.passes.schedule.uses import UsedParam, outermost, units_around
from fsdp_compile.passes.wire.ledger import Called, Issued, ledger
from fsdp_compile.passes.wire.spec import with_use, without_use

_NO_USE = ("__get__", "__set__", "size", "dim", "numel")  # metadata


class _Reads(TorchFunctionMode):
    """Notes the parameters that each operation is given."""

    def __init__(self, known: dict[int, tuple[str, str, Any]]) -> None:
        super().__init__()
        self._known, self.uses = known, list[UsedParam]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)) if func.__name__ not in _NO_USE else ():
            if id(one) in self._known:
                self.uses.append(UsedParam(*self._known[id(one)], (len(self.uses),)))
        return func(*args, **(kwargs or {}))


def scheduled(model: nn.Module, plain: nn.Module, run: Callable[[nn.Module], object]) -> Plan:
    """Return the schedule of ``run(model)``, which is sharded, from what ``run(plain)`` reads, and what model says of it."""
    paths, named = paths_in([model]), dict(plain.named_parameters(remove_duplicate=False))
    known = {}
    for unit in units_in(model):
        names = names_in(unit, paths)
        for param in unit.params:
            at = f"{unit.label}:{', '.join(paths[module] for module in unit.modules)}"
            known[id(named[names[param.fqn]])] = at, names[param.fqn], spec_of(unit, param)
    reads = _Reads(known)
    with reads:
        run(plain)
    trained = {known[id(param)][1] for param in plain.parameters() if param.requires_grad and id(param) in known}
    return schedule(reads.uses, trained)


def schedule(uses: Sequence[UsedParam], trained: Collection[str]) -> Plan:
    """Return the plan of a step whose forward uses these parameters at these places; ``trained`` take a gradient.

    A unit that is used again after another one has uses of its own, numbered. Backward has the reverse order. It comes to a unit where forward last used it, or a unit inside it, and to
    none that forward only used before the first parameter that takes a gradient. It does not read tables.
    """
    uses = _told_apart(sorted(uses, key=lambda one: one.turn))
    around = units_around({one.unit for one in uses})
    begins = min((one.place[0] for one in uses if without_use(one.fqn) in trained), default=0)
    end = max((one.place[0] for one in uses), default=0)
    first: dict[str, UsedParam] = {}
    last: dict[str, int] = {}
    for one in uses:
        first.setdefault(one.fqn, one)
        last.update(dict.fromkeys((one.unit, *around[one.unit]), one.place[0]))
    again = [
        dataclasses.replace(one, place=(2 * (end - last[one.unit]), len(around[one.unit])))
        for one in first.values()
        if one.spec.regather and not one.spec.is_table and last[one.unit] >= begins
    ]
    reduces = [
        dataclasses.replace(one, place=(2 * (end - one.place[0]) + 1,))
        for one in first.values()
        if without_use(one.fqn) in trained
    ]
    kept: dict[str, int] = {}
    for one in reduces:
        if not one.spec.regather:
            kept[one.unit] = min(one.place[0], kept.get(one.unit, one.place[0]))
    return Plan(
        stage="joint",
        again=tuple(one.fqn for one in again),
        keep=tuple(one.fqn for one in first.values() if not one.spec.regather),
        forward=launches("forward", [*first.values()], []),
        backward=launches("backward", again, reduces, backwards=True, kept=kept),
    )


def _told_apart(uses: Sequence[UsedParam]) -> list[UsedParam]:
    """Return the uses with the numbers of later ones of a unit in its name, and in those of its parameters."""
    around = units_around({one.unit for one in uses})
    tops = outermost(around)
    number = dict.fromkeys(around, 1)
    ended, seen = set[str](), set[str]()
    found = []
    for one in uses:
        if one.unit in ended:
            number[one.unit] += 1
            ended.discard(one.unit)
        if one.unit not in tops or one.fqn not in seen:  # the outermost unit's parameters come one by one
            apart = {other for other in around if other not in (one.unit, *around[one.unit])}
            ended |= {other for other in apart - tops if other in seen and one.unit not in around[other]}
        seen |= {one.unit, one.fqn}
        use = number[one.unit]
        found.append(dataclasses.replace(one, unit=with_use(one.unit, use), fqn=with_use(one.fqn, use)))
    return found


@contextmanager
def heard(groups: bool = False) -> Iterator[list[tuple[str, ...]]]:
    """Yield a list to which each collective is added when it runs: its kind, and its parameters; or its group."""
    found: list[tuple[str, ...]] = []
    ledger.hear = lambda entry: found.extend(_groups(entry) if groups else _sent(entry))
    try:
        yield found
    finally:
        ledger.hear = None


def _sent(entry: Issued | Called) -> Iterator[tuple[str, ...]]:
    if isinstance(entry, Called):
        sent = [(one.kind, *one.names) for one in entry.text.launches]
    else:
        unit = entry.unit()
        names = names_in(unit, paths_in([unit.root.modules[0]]))
        sent = [(entry.kind, *(names[spec.fqn] for spec in entry.specs))]
    for kind, *fqns in sent:
        if kind != "all_reduce":  # over replicas: a part of the reduction before it
            yield "gather" if kind == "all_gather" else "reduce", *map(without_use, fqns)


def _groups(entry: Issued | Called) -> list[tuple[str, ...]]:
    sent = entry.text.launches if isinstance(entry, Called) else [entry]
    return [(one.kind, one.group) for one in sent]


def launched(plan: Plan) -> list[tuple[str, ...]]:
    """Return the launches of forward and, set apart, of backward, each as its kind and the names of its parameters."""
    found: list[tuple[str, ...]] = []
    for half in (plan.forward, plan.backward):
        assert half is not None
        found += [("backward",)] if half is plan.backward else []
        for kind, index in half.order:
            fqns = (half.gathers if kind == "gather" else half.reduces)[index].fqns
            found.append((kind, *map(without_use, fqns)))
    return found


def written(plan: Plan) -> str:
    """Return the same as text, a line for each launch, with bytes, ranks and replicas."""
    lines = []
    for half in (plan.forward, plan.backward):
        assert half is not None
        lines.append(half.stage)
        for kind, index in half.order:
            one = (half.gathers if kind == "gather" else half.reduces)[index]
            over = f"{one.num_ranks} ranks" + (f", {one.num_replicas} replicas" if one.num_replicas > 1 else "")
            lines.append(f"  {kind:6}  {' '.join(one.fqns)}  ({one.num_bytes} bytes of {one.dtype}, {over})")
    return "\n".join(lines) + "\n"
