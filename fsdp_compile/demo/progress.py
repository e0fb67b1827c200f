"""Show the progress of the demo, a line a stage: its name when it begins, its duration when it ends.

    start 2 ranks ... 6 s
    fsdp_compile: C++ kernels of the forward graph ... 14 s
    train all four in turn: step 12 of 30 ... 0:00:07          <- a terminal shows the last line's clock

In a file the lines are the same, without the clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Stage = tuple[str, int, int]  # its name, the step that begins, the number of its steps (0: it has none)


class Stages:
    """Prints the lines of the stages; ``following`` makes it."""

    def __init__(self, console: Console, clock: Progress) -> None:
        self._console = console
        self._clock = clock
        self._name = ""
        self._began = 0.0

    def at(self, stage: Stage) -> None:
        """Begin this stage, or its next step; a new name ends the stage before."""
        name, step, num_steps = stage
        if name != self._name:
            self.end()
            self._name, self._began = name, time.monotonic()
            if not self._console.is_terminal:
                self._console.print(f"{name} ... ", end="", highlight=False)
            self._clock.add_task(name)
        for task in self._clock.task_ids:
            self._clock.update(task, description=f"{name}: step {step} of {num_steps}" if num_steps else name)

    def end(self) -> None:
        """End the last stage, which took until now."""
        if not self._name:
            return
        for task in list(self._clock.task_ids):
            self._clock.remove_task(task)
        took = f"{time.monotonic() - self._began:.0f} s"
        said = f"{self._name} ... " if self._console.is_terminal else ""
        self._console.print(f"{said}{took}", highlight=False)
        self._name = ""

    def break_off(self) -> None:
        """End a stage that failed: its line stays, without a time."""
        self._console.print(f"{self._name} ..." if self._console.is_terminal else "", highlight=False)


@contextlib.contextmanager
def following(console: Console) -> Iterator[Stages]:
    """Show stages while the block runs; an exception leaves the line of its stage unfinished."""
    columns = (SpinnerColumn(), TextColumn("{task.description} ..."), TimeElapsedColumn())
    clock = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    stages = Stages(console, clock)
    with clock:
        try:
            yield stages
        except BaseException:
            stages.break_off()
            raise
        stages.end()
