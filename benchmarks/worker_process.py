"""What each worker does whatever it measures: pin itself, die with its parent, report, join its group."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.settings import Job, RankResult

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PR_SET_PDEATHSIG = 1


class Progress:
    """The stage that this rank is in, kept in a file so that the parent can say where a run got stuck."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = run_dir / f"rank{rank}.stage"

    def __call__(self, stage: str) -> None:
        self._file.write_text(stage)


def main() -> None:
    """`<measuring module> job.json rank`: leave rank<N>.json or rank<N>.error in the job's run_dir.

    The module is imported, and torch with it, only after the process is pinned (threads inherit the core) and
    bound to its parent (importing torch takes seconds in which the parent may die).
    """
    module, job_file, rank_text = sys.argv[1:]
    job, rank = Job.read(Path(job_file)), int(rank_text)
    run_dir = Path(job.run_dir)
    _die_with_parent(job.parent_pid)
    os.sched_setaffinity(0, {job.cores[rank]})
    try:
        result: RankResult = import_module(module).measure(job, rank, Progress(run_dir, rank))
    except Exception as error:
        report = {"at": time.time(), "kind": type(error).__name__, "message": str(error)}
        (run_dir / f"rank{rank}.error").write_text(json.dumps(report))
        traceback.print_exc()
        # A peer may wait for us in a collective: leave at once, without the teardown of torch.
        sys.stderr.flush()
        os._exit(1)
    (run_dir / f"rank{rank}.json").write_text(json.dumps(dataclasses.asdict(result)))
    from fsdp_compile._launch import leave  # after measuring: most variants are not ours

    leave()


def join_group(job: Job, rank: int, world: int) -> DeviceMesh:
    """A gloo group over the job's interfaces. Rank 0 chooses the port, so that no two runs collide."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    timeout = timedelta(seconds=job.timeout_s)
    port_file = Path(job.run_dir) / "port"
    os.environ["GLOO_SOCKET_IFNAME"] = job.interfaces[rank]
    if rank == 0:
        store = dist.TCPStore(job.address, 0, world, is_master=True, timeout=timeout, wait_for_workers=False)
        partial_file = port_file.with_suffix(".partial")
        partial_file.write_text(str(store.port))
        partial_file.rename(port_file)
    else:
        deadline = time.monotonic() + job.timeout_s
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 published no port within {job.timeout_s:.0f} s")
            time.sleep(0.05)
        port = int(port_file.read_text())
        store = dist.TCPStore(job.address, port, world, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    return init_device_mesh("cpu", (world,))


def prime_compiler() -> None:
    """Compile something trivial first: with an empty cache, Inductor also probes the C++ compiler and
    precompiles headers. That takes 15 seconds, the same for every variant, and would drown what differs."""
    import torch

    torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _die_with_parent(parent_pid: int) -> None:
    """Even a parent killed with SIGKILL leaves no worker behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the benchmark that started this worker is gone")


if __name__ == "__main__":
    main()
