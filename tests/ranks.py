"""Worker processes that talk over gloo on loopback, started once for a test module.

ranks.run(fn, *args)    calls the module-level function fn(*args) on every rank; returns the results by rank
"""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """``num_ranks`` processes with one group; with NCCL, each has a GPU."""

    def __init__(self, num_ranks: int, backend: str = "gloo") -> None:
        self.num_ranks = num_ranks
        self._rendezvous = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 (lives as long as the ranks)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch._inductor.compile_fx"])
        os.environ["OMP_NUM_THREADS"] = "1"
        self._workers: list[tuple[Any, Connection]] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(backend, rank, num_ranks, self._rendezvous.name, theirs), daemon=True
            )
            process.start()
            self._workers.append((process, ours))

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 400) -> list[Any]:
        for _, pipe in self._workers:
            pipe.send((fn, args))
        results, failures = [], []
        for rank, (process, pipe) in enumerate(self._workers):
            if not pipe.poll(timeout_s):
                failures.append(f"rank {rank} did not answer in {timeout_s} s")
                timeout_s = 1
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                process.join(5)
                ok, value = False, f"died with exit code {process.exitcode}"
            (results if ok else failures).append(value if ok else f"rank {rank}: {value}")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def stop(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
        for process, _ in self._workers:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._rendezvous.close()
        if os.path.exists(self._rendezvous.name):
            os.unlink(self._rendezvous.name)
        self._workers = []

    @property
    def alive(self) -> bool:
        return bool(self._workers)


def _mend_gathers_on_gloo() -> torch.library.Library:
    """Have torch's functional all-gather, which ``DTensor.full_tensor`` calls, do what ours does.

    On gloo it corrupts the heap now and then (see passes/collectives.py), and tests gather to compare all the time.
    """
    from fsdp_compile.passes import collectives

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", collectives._all_gather_kernel, "CPU")
    return library


def _serve(backend: str, rank: int, num_ranks: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    _mended = _mend_gathers_on_gloo()  # for as long as it is referred to
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            break
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        try:
            pipe.send((True, fn(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
