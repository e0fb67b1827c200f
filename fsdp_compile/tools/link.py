"""A slow network between two ranks of one machine: two network namespaces joined by a rate-limited veth pair.

    namespace 0                                   namespace 1
    rank 0 -- fclink0 10.99.0.1  == tbf rate ==  10.99.0.2 fclink1 -- rank 1

Over loopback, communication is copying and competes with compute for the core, so overlap cannot show. Here a
collective waits on the wire, and compute can run beside it. The benchmarks and ``fsdp-compile calibrate`` use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

_PREFIX = "fsdp-compile-bench-"
_INTERFACES = ("fclink0", "fclink1")
_ADDRESSES = ("10.99.0.1", "10.99.0.2")  # in fresh namespaces, where no address of the host can clash


class LinkError(Exception):
    """The link cannot be made; the message says why, and what to do."""


class SlowLink(contextlib.AbstractContextManager["SlowLink"]):
    """The namespaces exist inside the `with` block and not after it, whatever ends it."""

    def __init__(self, rate: str) -> None:
        self.rate = rate
        self.interfaces = _INTERFACES
        self.address = _ADDRESSES[0]
        self._namespaces = tuple(f"{_PREFIX}{os.getpid()}-{end}" for end in range(2))

    @property
    def prefixes(self) -> tuple[tuple[str, ...], ...]:
        """The words to put before each rank's command, so that it runs in its namespace."""
        return tuple(("ip", "netns", "exec", namespace) for namespace in self._namespaces)

    def __enter__(self) -> SlowLink:
        check_possible()
        _remove_stale()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _build(self) -> None:
        for namespace in self._namespaces:
            _ip("netns", "add", namespace)
        left, right = self._namespaces
        _ip(
            *("link", "add", _INTERFACES[0], "netns", left, "type", "veth"),
            *("peer", "name", _INTERFACES[1], "netns", right),
        )
        for namespace, interface, address in zip(self._namespaces, _INTERFACES, _ADDRESSES, strict=True):
            _ip("-n", namespace, "address", "add", f"{address}/30", "dev", interface)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", interface, "up")
            _run(
                *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root"),
                *("tbf", "rate", self.rate, "burst", "1mb", "latency", "50ms"),
            )

    def _remove(self) -> None:
        # A second Ctrl-C, or a terminal that is closed meanwhile, must not interrupt the removal.
        ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in ending}
        try:
            for namespace in self._namespaces:
                _delete(namespace)  # deletes its end of the veth pair, and with that the other end
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def bytes_per_s(rate: str) -> float:
    """Convert a rate as `tc` writes it (1gbit, 500mbit)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if match is None:
        raise LinkError(f"--link takes a rate such as 1gbit or 500mbit, not {rate!r}.")
    found = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8
    if not found:
        raise LinkError(f"--link {rate} lets nothing through: give a rate above 0, such as 1gbit.")
    return found


def check_possible() -> None:
    if os.geteuid() != 0:
        raise LinkError("--link makes network namespaces and needs root: run as root, or leave --link out.")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkError(f"--link needs the command `{tool}`: install iproute2, or leave --link out.")


def _remove_stale() -> None:
    """Remove namespaces of benchmarks that were killed with SIGKILL; the process id is in a namespace's name."""
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, pid in re.findall(rf"^({re.escape(_PREFIX)}(\d+)-\d)", listing, flags=re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            _delete(name)


def _delete(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LinkError(f"--link: `{' '.join(command)}` failed: {done.stderr.strip() or 'no message'}")
