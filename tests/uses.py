"""What a step launches: by the schedule, from how a copy that is not sharded uses its parameters; and as it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fsdp_compile.core.spec import spec_of
from fsdp_compile.core.unit import names_in, paths_in, units_in
from fsdp_compile.passes import Plan
from fsdp_compile.passes.schedule.schedule import schedule
from fsdp_compile.passes.schedule.uses import Use
from fsdp_compile.passes.wire.ledger import Called, Issued, ledger

_NO_USE = ("__get__", "__set__", "size", "dim", "numel")  # metadata


class _Reads(TorchFunctionMode):
    """Notes the parameters that each operation is given."""

    def __init__(self, known: dict[int, tuple[str, str, Any]]) -> None:
        super().__init__()
        self._known, self.uses = known, list[Use]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in tree_leaves((args, kwargs)) if func.__name__ not in _NO_USE else ():
            if id(one) in self._known:
                self.uses.append(Use(*self._known[id(one)], (len(self.uses),)))
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


@contextmanager
def heard() -> Iterator[list[tuple[str, ...]]]:
    """Yield a list to which each collective is added when it runs: its kind, and the names of its parameters."""
    found: list[tuple[str, ...]] = []
    ledger.hear = lambda entry: found.extend(_sent(entry))
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
            yield "gather" if kind == "all_gather" else "reduce", *fqns


def launched(plan: Plan) -> list[tuple[str, ...]]:
    """Return the launches of forward and, set apart, of backward, each as its kind and the names of its parameters."""
    found: list[tuple[str, ...]] = []
    for half in (plan.forward, plan.backward):
        assert half is not None
        found += [("backward",)] if half is plan.backward else []
        for kind, index in half.order:
            found.append((kind, *(half.gathers if kind == "gather" else half.reduces)[index].fqns))
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
