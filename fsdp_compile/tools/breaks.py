"""Explain why a model is not one graph: which module broke it, where and why, and what is read outside of graphs.

    report = fsdp_compile.explain_breaks(model, batch)
    print(report)                          # 2 graphs, 1 break, 1 module that reads parameters eagerly
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._torch_compat import dynamo
from ..api.fitting import listed
from ..core.unit import original_class, plain_path
from ..eager import forward as eager
from .tables import plural
from .trial import module_given, observing


@dataclass(frozen=True)
class GraphBreak:
    """One place where Dynamo gave up on a frame."""

    modules: tuple[str, ...]  # such as "layers.0 (Block)": modules whose code has the break; empty for other code
    where: str  # file:line in function
    reason: str
    hint: str


@dataclass
class BreakReport:
    """The result of ``explain_breaks``."""

    breaks: list[GraphBreak] = field(default_factory=list)
    eager_reads: dict[str, list[str]] = field(default_factory=dict)  # parameters by the module that reads them
    num_graphs: int = 0

    def __bool__(self) -> bool:
        """Whether the model is one graph."""
        return self.num_graphs == 1 and not self.breaks and not self.eager_reads

    def __str__(self) -> str:
        lines = [
            f"{plural(self.num_graphs, 'graph')}, {plural(len(self.breaks), 'break')}, "
            f"{plural(len(self.eager_reads), 'module')} with parameters that are read outside of graphs"
        ]
        for number, one in enumerate(self.breaks, 1):
            lines.append(f"{number}. {listed(one.modules, most=3) or 'code of no module'}, {one.where}")
            lines.append(f"   {one.reason}")
            if one.hint:
                lines.append(f"   {one.hint}")
        for module, names in self.eager_reads.items():
            lines.append(f"eager: {module} reads {', '.join(names)}, gathered in no graph")
        return "\n".join(lines)


def explain_breaks(model: nn.Module, *args: Any, **kwargs: Any) -> BreakReport:
    """Run one forward of ``model(*args, **kwargs)`` under Dynamo, and say what kept it from being one graph.

    Every rank must call it, because the forward communicates. Like any forward, it updates running statistics. The
    model's compiled code is dropped, and compiles again when the model next runs.
    """
    model = module_given(model, "explain_breaks")
    report = BreakReport()
    classes = {type(module) for module in model.modules()}
    dynamo.forget_compiled(classes)
    num_graphs_before = dynamo.num_dynamo_graphs()
    with watching(model, report):
        torch.compile(model, backend="eager")(*args, **kwargs)
    report.num_graphs = dynamo.num_dynamo_graphs() - num_graphs_before
    dynamo.forget_compiled(classes)
    return report


@contextmanager
def watching(model: nn.Module, report: BreakReport) -> Iterator[None]:
    """Add to ``report`` the graph breaks and the eager reads that happen inside the block."""
    names = {module: _name(path, module) for path, module in model.named_modules()}

    def on_break(stack: Any, reason: str) -> None:
        innermost_first = [(one, _modules_at(names, one.filename, one.lineno)) for one in reversed(stack)]
        in_modules = [(frame, modules) for frame, modules in innermost_first if modules]
        frame, modules = next(iter(in_modules or innermost_first), (None, ()))
        where = "" if frame is None else f"{frame.filename}:{frame.lineno} in {frame.name}"
        found = GraphBreak(modules, where, *_reason_and_hint(reason))
        if found not in report.breaks:
            report.breaks.append(found)

    def on_read(module: nn.Module, name: str) -> None:
        if module in names:
            reads = report.eager_reads.setdefault(names[module], [])
            if name not in reads:
                reads.append(name)

    with dynamo.graph_breaks(on_break), observing(eager.read_observers, on_read):
        yield


def _name(path: str, module: nn.Module) -> str:
    return f"{plain_path(path)} ({original_class(module).__name__})"


def _modules_at(names: dict[nn.Module, str], filename: str, line: int) -> tuple[str, ...]:
    """Return the names of the modules that have a method around this line."""
    classes = {original_class(module) for module in names}
    at = {cls for cls in classes if any(_spans(function, filename, line) for function in _functions(cls))}
    return tuple(name for module, name in names.items() if original_class(module) in at)


def _functions(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if base in (nn.Module, object):
            return
        for value in vars(base).values():
            value = inspect.unwrap(value) if callable(value) else value
            if inspect.isfunction(value):
                yield value


def _spans(function: Any, filename: str, line: int) -> bool:
    code = function.__code__
    if code.co_filename != filename or line < code.co_firstlineno:
        return False
    return line <= max((last for _, _, last in code.co_lines() if last is not None), default=0)


def _reason_and_hint(text: str) -> tuple[str, str]:
    """Return the first line of Dynamo's message with its explanation, and its first hint."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next(iter(lines), "unknown")
    explanation = next((line for line in lines if line.startswith("Explanation:")), "")
    hint = next((line for line in lines if line.startswith("Hint:")), "")
    return f"{reason}. {explanation.removeprefix('Explanation: ')}".rstrip(". ") + ".", hint.removeprefix("Hint: ")
