"""What ``python -m fsdp_compile.run`` has each Python process do that its script starts: adopt, once torch is imported.

Python imports the first module of this name in its path when it starts, and ``run`` puts this folder there, by
PYTHONPATH. A process that never imports torch does nothing, and neither does another installation's Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE_IN = os.path.dirname(os.path.dirname(_HERE))


class _AdoptBehindTorch:
    """Finds torch as Python does, and adopts when it has been imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(_AdoptBehindTorch)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_adopt(module: ModuleType) -> None:
            run(module)
            if importlib.util.find_spec("fsdp_compile") is None:  # only the first process has it in its path
                sys.path.append(_PACKAGE_IN)
            importlib.import_module("fsdp_compile.adoption").adopt()

        spec.loader.exec_module = run_and_adopt  # type: ignore[method-assign]
        return spec


def _is_to_adopt() -> bool:
    is_inductors = any("compile_worker" in argument for argument in sys.orig_argv)  # which has no model
    return os.environ.get("FSDP_COMPILE_RUN") == sys.prefix and not is_inductors


def _run_the_next() -> None:
    """The module of this name that Python would have imported without this one."""
    elsewhere = [one for one in sys.path if os.path.abspath(one) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


if _is_to_adopt():
    sys.meta_path.insert(0, _AdoptBehindTorch)
if __name__ == "sitecustomize":
    _run_the_next()
