"""What this process is doing, as seen from a thread of its own: to be watched costs training nothing.

    a thread is in the ledger's ``wait``                      waits: eagerly, for a collective of ours
    a thread is at a wait in code that Inductor generated     waits
    the main thread is in torch.distributed                   waits elsewhere
    anything else                                             runs

On a GPU a wait does not block the CPU: there a rank "runs" until its own thread waits for the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterator
from types import FrameType

from .._torch_compat import interrupting
from ..passes import _torch_compat as passes_compat
from ..passes.wire.ledger import Ledger

_WAIT = Ledger.wait.__code__


class Waiting:
    """What the process is doing, and since when."""

    def __init__(self) -> None:
        self._seen: Hashable = None
        self._since = time.monotonic()

    def look(self, progress: Hashable) -> tuple[str, int, float]:
        """Return what it is doing, on which thread, and for how many seconds with the same ``progress``, if it waits.

        The whole stack is walked only for a thread that waits: Dynamo's frames must not be touched while it compiles.
        """
        doing, thread = _doing()
        stack = [] if doing == "runs" else interrupting.stack_of(thread)
        seen = (doing, thread, progress, tuple((id(frame), frame.f_lasti) for frame in stack))
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return doing, thread, time.monotonic() - self._since


def interrupt(error: type[BaseException], done: dict[int, FrameType | None]) -> bool:
    """Have the threads that wait, or are between two waits of generated code, raise; return whether there are any.

    Each raises once, and again while it has not left the frame that it was in: Python drops what is raised in the
    callback of a weak reference, or in ``__del__``.
    """
    found = dict(_interruptible())
    for thread, frame in found.items():
        if done.setdefault(thread, frame) is frame:
            interrupting.raise_in(thread, error)
    for thread, interrupted in done.items():
        if found.get(thread) is not interrupted:
            done[thread] = None  # frames hold tensors
    return bool(found)


def _doing() -> tuple[str, int]:
    main = threading.main_thread().ident or 0
    for thread in _others():
        stack = interrupting.stack_of(thread, 2)  # two: ``wait`` is the second while it explains a failure
        at_wait = any(frame.f_code is _WAIT for frame in stack)
        if at_wait or (stack and interrupting.waits_in_generated_code(stack[0])):
            return "waits", thread
    stack = interrupting.stack_of(main, 1)
    if stack and interrupting.waits_in_torch_distributed(stack[0]):
        return "waits elsewhere", main
    return "runs", main


def _interruptible() -> Iterator[tuple[int, FrameType]]:
    """Yield the threads to interrupt, each with the outermost frame that an error of ours is to leave."""
    main = threading.main_thread().ident
    for thread in _others():
        stack = interrupting.stack_of(thread)
        ours = [frame for frame in stack if frame.f_code is _WAIT or passes_compat.is_generated_code(frame)]
        if ours:
            yield thread, ours[-1]
        elif thread == main and stack and interrupting.waits_in_torch_distributed(stack[0]):
            yield thread, stack[0]


def _others() -> list[int]:
    this = threading.get_ident()
    return [thread.ident for thread in threading.enumerate() if thread.ident not in (None, this)]


def where(thread: int) -> str:
    """Return the innermost line of a thread's stack that is neither torch's nor ours, nor generated."""
    for frame in interrupting.stack_of(thread):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        path = frame.f_code.co_filename
        is_torchs = package == "torch" or "/torch/" in path or passes_compat.is_generated_code(frame)
        if package != "fsdp_compile" and not is_torchs and os.path.isfile(path):
            return f"{path}:{frame.f_lineno}"
    return ""
