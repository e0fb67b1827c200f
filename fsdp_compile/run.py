"""Run a script that was written for torch's FSDP2, or FSDP1, with this package in its place, unchanged.

    torchrun --nproc-per-node 2 -m fsdp_compile.run train.py --steps 10
    torchrun --nproc-per-node 2 -m fsdp_compile.run -m package.train --steps 10

``adopt()`` is called, then the script runs as Python would run it: as ``__main__``, with its own ``sys.argv``, and with
its own folder first in ``sys.path``. Processes that the script starts are not adopted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

from .adoption import adopt


def main(argv: Sequence[str] | None = None) -> None:
    """Adopt, and run what the command line names in this process."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_compile.run", description="Run a script with torch's FSDP names being fsdp_compile's."
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="path of a Python file, or with -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    given = parser.parse_args(argv)
    if not given.module and not os.path.isfile(given.script):
        parser.error(f"{given.script} is not a file")
    adopt()
    if given.module:
        _run_module(given.script, given.args)
    else:
        _run_file(given.script, given.args)


def _run_file(path: str, args: list[str]) -> None:
    sys.argv = [path, *args]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
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
    """Run ``code`` as ``__main__``, a new module in this one's place, which stays there for what the code leaves."""
    module = types.ModuleType("__main__")
    vars(module).update(names)
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    main()
