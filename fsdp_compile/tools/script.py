"""Run a script as Python would: as ``__main__``, with its own ``sys.argv``, its own folder first in ``sys.path``."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any


def run_script(name: str, args: list[str], is_module: bool = False) -> None:
    """Run a file by its path, or a module by its name; it replaces this process's ``__main__`` for good."""
    if is_module:
        _run_module(name, args)
    else:
        _run_file(name, args)


def _run_file(path: str, args: list[str]) -> None:
    sys.argv = [path, *args]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # without this file's __future__
    _execute(code, {"__file__": path, "__loader__": loader, "__package__": None, "__spec__": None})


def _run_module(name: str, args: list[str]) -> None:
    spec = importlib.util.find_spec(name)  # sys.path[0] is the working directory already
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        raise ImportError(f"There is no module {name} that can be run.", name=name)
    code = spec.loader.get_code(spec.name)
    sys.argv = [spec.origin or name, *args]
    _execute(code, _names_of(spec))


def _names_of(spec: ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }


def _execute(code: Any, names: dict[str, Any]) -> None:
    """Run ``code`` in a new module ``__main__``, which stays there for functions that the code leaves behind."""
    module = types.ModuleType("__main__")
    vars(module).update(names)
    sys.modules["__main__"] = module
    exec(code, vars(module))
