"""Run a script that was written for torch's FSDP2 or FSDP1, unchanged, with this package in the place of torch's.

    torchrun --nproc-per-node 2 -m fsdp_compile.run train.py --steps 10
    torchrun --nproc-per-node 2 -m fsdp_compile.run -m package.train --steps 10

``adopt()`` is called, then the script runs as Python would run it: as ``__main__``, with its own ``sys.argv``, and with
its own folder first in ``sys.path``. Python processes of the same installation that the script starts call ``adopt()``
as well, when they import torch (``started/sitecustomize.py``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .adoption import adopt
from .tools.script import run_script

_STARTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "started")


def main(argv: Sequence[str] | None = None) -> None:
    """Call ``adopt()``, then run the script that the command line names, in this process."""
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
    _reach_processes_started()
    run_script(given.script, given.args, is_module=given.module)


def _reach_processes_started() -> None:
    """Make the Python processes that the script starts adopt as well, by the environment that they inherit."""
    os.environ["FSDP_COMPILE_RUN"] = sys.prefix
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _STARTED not in before:
        os.environ["PYTHONPATH"] = os.pathsep.join([_STARTED, *filter(None, before)])


if __name__ == "__main__":
    main()
