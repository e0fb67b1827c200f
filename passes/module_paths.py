"""The path of a module in its model, from the text in which Dynamo says how a frame reaches it.

    L['self'].layers.3                              L, self, layers, 3
    L['self'].heads._modules['x[0]']                L, self, heads, x[0]        a key of a ModuleDict
    getattr(getattr(L['self'], 'a b').up, 'c d')    L, self, a b, up, c d       a name that is no identifier

A name without quotes stands behind a dot as it is, whatever it is: what looks like a bracket in it need not be one.
"""

from __future__ import annotations

import ast
import re

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_INDEX = rf"\[(?:{_QUOTED}|[^'\"\].]*)\]"
_GETATTR = "getattr("
_END = rf", ({_QUOTED})\)"  # of a getattr: the name that it asks for
# One step of a path: the end of a getattr, what is in brackets, or what stands behind a dot.
_STEP = re.compile(rf"""{_END}|\[({_QUOTED}|[^'"\].]*)\]|\.?((?:(?!{_END}|{_INDEX})[^.])+)""", re.DOTALL)
_WRAPPERS = ("_modules", "__dict__", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def path_of(source: str) -> tuple[str, list[str]]:
    """What the model is called in the frame, where that is a local variable; and the module's path in it."""
    while source.startswith(_GETATTR):
        source = source.removeprefix(_GETATTR)
    steps = [_unquoted(next(filter(None, found), "")) for found in _STEP.findall(source)]
    components = without_wrappers(steps)
    return (components[1], components[2:]) if components[:1] == ["L"] else ("", components[1:])


def without_wrappers(path: list[str]) -> list[str]:
    """The path as a user knows it: what compiles or checkpoints a module is no part of it."""
    return [step for step in path if step not in _WRAPPERS]


def _unquoted(step: str) -> str:
    """A module's name, of which Dynamo writes what is not plain as Python would."""
    quote = step[0] if step[:1] in ("'", '"') else '"'
    try:
        return str(ast.literal_eval(step if step[:1] == quote else f"{quote}{step}{quote}"))
    except (SyntaxError, ValueError):
        return step
