"""Find the path of a module in its model, from Dynamo's text for how a frame reaches the module.

    L['self'].layers.3                              L, self, layers, 3
    L['self'].heads._modules['x[0]']                L, self, heads, x[0]        a key of a ModuleDict
    getattr(getattr(L['self'], 'a b').up, 'c d')    L, self, a b, up, c d       a name that is no identifier

Dynamo writes a name without quotes after a dot as it is, whatever it contains: a bracket in it may be part of the name.
"""

from __future__ import annotations

import ast
import re

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_INDEX = rf"\[(?:{_QUOTED}|[^'\"\].]*)\]"
_GETATTR = "getattr("
_END = rf", ({_QUOTED})\)"  # of a getattr: the name that it asks for
# One step of a path: the end of a getattr, an index in brackets, or a name after a dot.
_STEP = re.compile(rf"""{_END}|\[({_QUOTED}|[^'"\].]*)\]|\.?((?:(?!{_END}|{_INDEX})[^.])+)""", re.DOTALL)
_WRAPPERS = ("_modules", "__dict__", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def path_of(source: str) -> tuple[str, list[str]]:
    """Return the model's name in the frame, if it is a local variable there, and the module's path in the model."""
    while source.startswith(_GETATTR):
        source = source.removeprefix(_GETATTR)
    steps = [_unquoted(next(filter(None, found), "")) for found in _STEP.findall(source)]
    components = without_wrappers(steps)
    return (components[1], components[2:]) if components[:1] == ["L"] else ("", components[1:])


def without_wrappers(path: list[str]) -> list[str]:
    """Return the path as a user knows it, without the wrappers that compile or checkpoint a module."""
    return [step for step in path if step not in _WRAPPERS]


def plain_name(name: str) -> str:
    """Return a dotted path, or a parameter's dotted name, without the wrappers that compile or checkpoint a module."""
    return ".".join(without_wrappers(name.split(".")))


def _unquoted(step: str) -> str:
    """Return a module's name without quotes; Dynamo escapes its special characters as Python does."""
    quote = step[0] if step[:1] in ("'", '"') else '"'
    try:
        return str(ast.literal_eval(step if step[:1] == quote else f"{quote}{step}{quote}"))
    except (SyntaxError, ValueError):
        return step
