"""`python -m benchmarks.train_step`: one training step of a small Llama under fsdp_compile and its peers.

Each variant trains in fresh processes, one per rank and core. Repeats are interleaved, so that a machine that
drifts hits all variants alike. Time, memory and the reference losses come from separate processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.launch import Outcome, launch
from benchmarks.records import Record, first_step_s, mean_losses
from benchmarks.settings import DTYPES, Job, Mode, Settings
from benchmarks.variants import VARIANTS
from fsdp_compile.tools.link import LinkError, SlowLink, bytes_per_s

_DEFAULT_JSON = Path(__file__).resolve().parent / "results" / "train_step.json"
_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}  # relative, at the worst step
MALLOC_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main() -> int:
    options = parse(sys.argv[1:])
    exit_on_sigterm()
    settings = settings_of(options)
    cores = sorted(os.sched_getaffinity(0))
    if settings.ranks > len(cores):
        print(f"note: {settings.ranks} ranks share {len(cores)} cores, so nothing here is one rank per core")
    environment = software_and_machine() | {
        "settings": dataclasses.asdict(settings),
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    records = {name: Record(name, VARIANTS[name].about) for name in options.variants}
    reference: list[float] = []
    interrupted = False
    with ExitStack() as stack:
        link = stack.enter_context(SlowLink(options.link)) if options.link else None
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-compile-bench-")))
        bench = Bench(options, settings, link, cores, work)
        try:
            if options.repeat:
                outcome = bench.reference()
                reference = mean_losses(outcome.ranks) if outcome.error is None else []
                if outcome.error:
                    print(f"no reference, so losses are not checked: {outcome.error}")
            bench.measure(records)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: the table holds what was finished")
    if reference:
        report.check_losses(records, reference, tolerance_of(settings))
    grid = report.table(
        records,
        reference,
        title=title_of(options, settings),
        caption=caption_of(options, environment),
        with_sent_bytes=options.link is not None,
    )
    report.show(grid)
    report.save(options.json, grid, records, reference, environment)
    failed = any(record.problems for record in records.values()) or (options.repeat and not reference)
    return 130 if interrupted else int(bool(failed))


class Bench:
    """Runs jobs one after the other; what a run needs besides its variant and mode is fixed here."""

    def __init__(
        self, options: argparse.Namespace, settings: Settings, link: SlowLink | None, cores: list[int], work: Path
    ) -> None:
        self._options = options
        self._settings = settings
        self.limit_s = options.timeout
        self.preload: tuple[str, ...] = ()
        self._weigh_settings = dataclasses.replace(
            settings, batch=options.memory_batch, seq=options.memory_seq, steps=min(settings.steps, 3)
        )
        self._link = link
        on_gpu = settings.device == "cuda"
        self._cores = () if on_gpu else tuple(cores[rank % len(cores)] for rank in range(settings.ranks))
        self._env = gpu_environment(len(cores) // settings.ranks) if on_gpu else {}
        self._work = work
        self._num_runs = 0

    def reference(self) -> Outcome:
        return self._run("reference", "reference", self._settings, self._work / "cache" / "reference")

    def measure(self, records: dict[str, Record]) -> None:
        for repeat in range(self._options.repeat):
            for record in records.values():
                if not record.problems:  # a variant that failed once is not given its time-out again
                    self._time(record, repeat)
        for _ in range(self._options.memory):
            for record in records.values():
                if not record.problems:
                    self._weigh(record)

    def _time(self, record: Record, repeat: int) -> None:
        """The first run compiles into an empty cache; later ones find it filled, unless --cache cold."""
        always_cold = self._options.cache == "cold"
        name = "shared" if self._options.cache == "shared" else f"{record.name}{repeat if always_cold else ''}"
        cache_dir = self._work / "cache" / name
        cold = not cache_dir.exists()
        outcome = self._run(record.name, "time", self._settings, cache_dir)
        if not self._took(record, outcome):
            return
        record.runs.append(outcome.ranks)
        if outcome.ranks[0].peak_bytes:  # on a GPU, where weighing does not disturb timing
            record.memory_runs.append(outcome.ranks)
        (record.cold_first_step_s if cold else record.warm_first_step_s).append(first_step_s(outcome.ranks))
        if self._options.cache == "warm" and self._options.repeat == 1:  # no later run will see the warm cache
            shortest = dataclasses.replace(self._settings, warmup=0, steps=1)
            outcome = self._run(record.name, "time", shortest, cache_dir)
            if self._took(record, outcome):
                record.warm_first_step_s.append(first_step_s(outcome.ranks))

    def _weigh(self, record: Record) -> None:
        cache_dir = self._work / "cache" / f"{record.name}-memory"
        outcome = self._run(record.name, "memory", self._weigh_settings, cache_dir)
        if self._took(record, outcome):
            record.memory_runs.append(outcome.ranks)

    def _took(self, record: Record, outcome: Outcome) -> bool:
        record.log_tail = outcome.log_tail
        if outcome.error is None:
            return True
        record.problems.append(outcome.error)
        return False

    def _run(self, variant: str, mode: Mode, settings: Settings, cache_dir: Path) -> Outcome:
        self._num_runs += 1
        link = self._link if mode != "reference" else None
        job = Job(
            variant=variant,
            mode=mode,
            settings=settings,
            run_dir=str(self._work / f"run{self._num_runs}"),
            address=link.address if link else "127.0.0.1",
            interfaces=link.interfaces if link else ("lo",) * settings.ranks,
            cores=self._cores,
            timeout_s=self.limit_s,
        )
        begin = time.monotonic()
        outcome = launch(
            "benchmarks.worker",
            job,
            1 if mode == "reference" else settings.ranks,
            env=MALLOC_GIVES_BACK if mode == "memory" else self._env,
            cache_dir=cache_dir,
            prefixes=link.prefixes if link else (),
            preload=self.preload,
        )
        line = f"{variant:24}{mode:10}{time.monotonic() - begin:6.1f} s  {outcome.error or 'done'}"
        print(line, file=sys.stderr, flush=True)
        return outcome


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description="One training step of a Llama under fsdp_compile and its peers.",
        epilog="variants: " + "; ".join(f"{v.name} ({v.about})" for v in VARIANTS.values()),
    )
    default = Settings()
    add = parser.add_argument
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME", help="or all")
    for name in ("dim", "layers", "vocab", "batch", "seq", "ranks", "steps", "warmup", "seed"):
        add(f"--{name}", type=int, default=getattr(default, name), help="default: %(default)s")
    add("--repeat", type=int, default=3, help="time runs of each variant; 0 with --memory: weigh only")
    add("--dtype", choices=DTYPES, default="fp32", help="of stored parameters and of the reduction")
    add("--param-dtype", choices=DTYPES, help="of gathered parameters; autocast where nothing is sharded")
    add("--adamw", choices=("default", "fused", "foreach"), default="default", help="implementation of AdamW")
    add("--link", metavar="RATE", help="two network namespaces joined at e.g. 1gbit (needs root)")
    cache_help = "cold: all runs compile anew; shared: all variants find one another's kernels"
    add("--cache", choices=("cold", "warm", "shared"), default="warm", help=cache_help)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl with --device cuda, else gloo")
    memory_help = "also weigh each variant, in N runs of their own; 1 without a number"
    add("--memory", type=int, nargs="?", const=1, default=0, metavar="N", help=memory_help)
    add("--memory-batch", type=int, default=1, help="batch of the memory run; default: %(default)s")
    add("--memory-seq", type=int, default=64, help="sequence of the memory run; default: %(default)s")
    add("--timeout", type=float, default=900.0, help="seconds one run may take; default: %(default)s")
    add("--json", type=Path, default=_DEFAULT_JSON, help="all figures; the table goes beside it as .txt")
    options = parser.parse_args(arguments)
    options.backend = options.backend or ("nccl" if options.device == "cuda" else "gloo")
    if min(options.steps, options.ranks, options.batch, options.layers) < 1 or options.seq < 2:
        parser.error("--steps, --ranks, --batch and --layers must be at least 1, --seq at least 2")
    if (options.dim % 64 and options.dim > 64) or options.dim % 2:
        parser.error("--dim must be a multiple of 64 (the width of a head), or an even number below it")
    if min(options.warmup, options.repeat, options.memory) < 0 or not (options.repeat or options.memory):
        parser.error("--warmup, --repeat and --memory must not be negative, and --repeat 0 needs --memory")
    if options.device == "cuda" and (options.memory or options.link):
        parser.error("--device cuda weighs the steps that it times, and has no --link: leave out --memory and --link")
    if options.link and options.ranks != 2:
        parser.error("--link joins two namespaces, one per rank: use it with --ranks 2")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    names = [each.name for each in dataclasses.fields(Settings) if hasattr(options, each.name)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    if options.link:
        settings = dataclasses.replace(settings, wire_bytes_per_s=bytes_per_s(options.link))
    return settings


def software_and_machine() -> dict[str, Any]:
    """Return what a figure depends on besides its options. It has no host name: results are meant to be published."""
    versions = {}
    for package in ("torch", "transformers", "torchtitan", "fsdp-compile"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "versions": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
    }


def tolerance_of(settings: Settings) -> float:
    """Return how far a loss may be from the reference's."""
    return _TOLERANCE["bf16" if "bf16" in (settings.dtype, settings.param_dtype) else "fp32"]


def title_of(options: argparse.Namespace, settings: Settings) -> str:
    size = f"Llama dim {settings.dim}, {settings.layers} layers, batch {settings.batch}, seq {settings.seq}"
    dtype = f"{settings.dtype}, computed in {settings.param_dtype or settings.dtype}"
    wire = f" over link of {options.link}" if options.link else " over loopback" if options.device == "cpu" else ""
    return f"{size}, {dtype}, AdamW ({settings.adamw}), {settings.ranks} ranks, {settings.backend}{wire}"


def caption_of(options: argparse.Namespace, environment: dict[str, Any]) -> str:
    torch_version = environment["versions"]["torch"]
    lines = [
        f"torch {torch_version}; {options.repeat} interleaved runs, each {options.steps} steps "
        f"after {1 + options.warmup}; median of the runs' medians on the slowest rank; spread over the runs, "
        "or over the steps of a single run.",
        "own, other, idle: of a step, CPU seconds of the thread that trains, of the others (gloo's), and neither.",
        "first step: with compilation, from an empty cache or a filled one; the C++ toolchain was primed.",
        "gloo's reduce_scatter moves the bytes of an all_reduce: compare rows that reduce in the same way.",
    ]
    if options.device == "cuda":
        lines.append("peak: all that PyTorch's allocator held at most in the timed steps.")
    if options.memory:
        lines.append(
            f"peak: of a step above what stands between steps, batch {options.memory_batch}, seq "
            f"{options.memory_seq}; median of {options.memory} runs of their own."
        )
    if environment["load_before"] > 0.5:
        lines.append(
            f"! the machine was not quiet: load {environment['load_before']:.1f} before the first run."
        )
    return "\n".join(lines)


def gpu_environment(num_cores: int) -> dict[str, str]:
    """Return the environment of a rank that computes on a GPU, so that all its cores compile."""
    threads = str(max(1, num_cores))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}


def exit_on_sigterm() -> None:
    """Let SIGTERM end the program through its `finally` blocks, so that no namespace and no process stays."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except LinkError as error:
        raise SystemExit(str(error)) from error
