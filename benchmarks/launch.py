"""Run one process for each rank, and return what they measured, or why they did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.settings import Job, RankResult
from fsdp_compile.workers import WorkerError, Workers

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a rank has one core; a pool would also outlive it
    "TOKENIZERS_PARALLELISM": "false",
}
_NUM_LINES = 20  # kept of rank 0's log, for its warnings, in a run that went well


@dataclass(frozen=True)
class Outcome:
    """Either the results of all ranks, or a sentence that says why there are none; and what the workers wrote last."""

    ranks: tuple[RankResult, ...] = ()
    error: str | None = None
    log_tail: str = ""


def launch(
    module: str,
    job: Job,
    num_ranks: int,
    *,
    env: Mapping[str, str],
    cache_dir: Path,
    prefixes: Sequence[Sequence[str]] = (),
    preload: Sequence[str] = (),
) -> Outcome:
    """Run `module.measure` in one process per rank; `prefixes` go before the command (`ip netns exec ...`).

    With `preload`, the processes are forked with these modules imported, and have this process's environment and not
    `env`.
    """
    run_dir = Path(job.run_dir)
    run_dir.mkdir(parents=True)
    stages = ["starting"] * num_ranks
    results: dict[int, RankResult] = {}
    try:
        with Workers(
            "benchmarks.worker_process:work",
            {"module": module, "job": job, "cache_dir": str(cache_dir)},
            num_ranks=num_ranks,
            log_dir=run_dir,
            env={**ENVIRONMENT, **env},
            prefixes=prefixes,
            preload=preload,
        ) as workers:
            for rank, message in workers.messages(limit_s=job.timeout_s):
                if "stage" in message:
                    stages[rank] = message["stage"]
                    continue
                results[rank] = message["result"]
                if len(results) == num_ranks:
                    break  # they are killed: what they still do, such as leaving their group, may take for ever
    except WorkerError as error:
        summary = error.summary.removeprefix("Unavailable: ")
        if not error.raised:
            summary += " (" + ", ".join(f"rank {rank} in {stage!r}" for rank, stage in enumerate(stages)) + ")"
        return Outcome(error=summary, log_tail=str(error))
    log = run_dir / "rank0.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return Outcome(tuple(results[rank] for rank in range(num_ranks)), log_tail="\n".join(lines[-_NUM_LINES:]))
