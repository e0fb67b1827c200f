"""How to end the waits of threads that wait in a collective.

On gloo, tried on torch 2.11 and 2.15, ``abort`` and ``shutdown`` of a process group or its backend do not end a wait,
which goes on to its own timeout. Closing the group's sockets ends it within milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator

import torch

from ..passes import _torch_compat as passes_compat


def end_waits() -> None:
    """Break all process groups of this process, so that all threads that wait in one, on any rank, raise.

    ``ProcessGroup.abort``, ``_world.pg_map``: 2.11 to 2.15.
    """
    for group, (backend, store) in list(torch.distributed.distributed_c10d._world.pg_map.items()):
        if "gloo" in backend:
            addresses = set(_gloo_addresses(store, range(group.size())))
            for connection in _connections():
                with connection, contextlib.suppress(OSError):
                    if {connection.getsockname()[:2], connection.getpeername()[:2]} & addresses:
                        connection.shutdown(socket.SHUT_RDWR)
        if backend != "gloo":
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()


def _gloo_addresses(store: torch.distributed.Store, ranks: range) -> Iterator[tuple[str, int]]:
    """Yield where the ranks of a group listen, as gloo says in the group's store: key ``cpu//0/RANK``, 2.11 to 2.15.

    The value is the length and the bytes of the host's name, then the length and the bytes of data that begins with a
    ``sockaddr_storage``.
    """
    for rank in ranks:
        for device in ("cpu", "cuda"):
            key = f"{device}//0/{rank}"
            if not store.check([key]):
                continue
            raw = store.get(key)
            raw = raw[8 + struct.unpack_from("=Q", raw)[0] + 8 :]
            (family,) = struct.unpack_from("=H", raw)
            (port,) = struct.unpack_from("!H", raw, 2)
            if family == socket.AF_INET:
                yield socket.inet_ntop(socket.AF_INET, raw[4:8]), port
            elif family == socket.AF_INET6:
                yield socket.inet_ntop(socket.AF_INET6, raw[8:24]), port


def _connections() -> Iterator[socket.socket]:
    """Yield this process's TCP connections, each as a second handle (Linux only)."""
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # gone by now
        if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
            yield connection
        else:
            connection.close()


def linger_in_abort() -> None:
    """Have a process that aborts live for some seconds more, so that its other threads can say why.

    Gloo aborts if a message is longer than what was to be received, which is how ranks that parted often end. The
    handler is libc's ``sleep``, which takes the signal's number, six, for seconds. If there is a handler, it stays.
    """
    if sys.platform != "linux" or signal.getsignal(signal.SIGABRT) is not signal.SIG_DFL:
        return
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    if before:
        libc.signal(signal.SIGABRT, before)  # a handler that Python does not know of


def default_store() -> torch.distributed.Store | None:
    """Return another connection to the store of the default process group; None if there is none to be had.

    ``Store.clone``: 2.11 to 2.15.
    """
    store = passes_compat.default_store()
    try:
        return None if store is None else store.clone()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
