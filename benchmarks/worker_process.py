"""What all workers do, whatever they measure: pin themselves, report, join their group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.settings import Job

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Progress = Callable[[str], None]
"""Told the stage that this rank is in, so that the parent can say where a run got stuck."""


def work(settings: dict[str, Any], rank: int, send: Callable[[dict[str, Any]], None]) -> None:
    """Run the measuring module and send its result.

    The module, and torch with it, is imported only after the process is pinned, because threads inherit the core. Our
    package is imported by the module or not at all: most variants are not ours. Each rank has its own Inductor cache,
    as on a machine of its own, so no rank warms another's.
    """
    job: Job = settings["job"]
    if job.cores:
        os.sched_setaffinity(0, {job.cores[rank]})
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{settings['cache_dir']}/rank{rank}"
    measure = import_module(settings["module"]).measure
    send({"result": measure(job, rank, lambda stage: send({"stage": stage}))})
    import torch.distributed as dist

    if dist.is_initialized():  # the result has been sent: NCCL may wait here for a rank that failed
        dist.destroy_process_group()


def join_group(job: Job, rank: int, world: int) -> DeviceMesh:
    """Join a group over the job's interfaces. Rank 0 chooses the port, so that no two runs collide."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    timeout = timedelta(seconds=job.timeout_s)
    port_file = Path(job.run_dir) / "port"
    os.environ["GLOO_SOCKET_IFNAME"] = job.interfaces[rank]
    gpu = take_gpu(rank, world) if job.settings.device == "cuda" else None
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
    backend = job.settings.backend
    device_id = gpu if backend == "nccl" else None  # NCCL connects at once; gloo has no use for it
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device_id
    )
    # init_device_mesh would put NCCL beside gloo on a machine with a GPU (2.11 to 2.15).
    return DeviceMesh.from_group(dist.group.WORLD, job.settings.device)


def take_gpu(rank: int, world: int) -> torch.device:
    """Make a GPU this rank's current one; call it before the process group is there.

    Ranks share GPUs where there are not enough. NCCL refuses two ranks of one host on one GPU (2.28; 2.30 can be told
    otherwise), so there each rank says that it is a host of its own: they talk over loopback.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if world > num_gpus:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0")
    gpu = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(gpu)
    return gpu


def finish(device: str) -> None:
    """Wait until the device has finished its work; clocks are read after that."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def prime_compiler(device: str = "cpu") -> None:
    """Compile something trivial first: with an empty cache, Inductor also probes the C++ compiler and
    precompiles headers. That takes 15 seconds, the same for every variant, and would drown what differs."""
    import torch

    torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=device))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
