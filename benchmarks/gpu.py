"""`python -m benchmarks.gpu`: all that only a GPU can show, in the few minutes that one can be had.

    tests                     all that are marked `gpu`: in one process, the demo's in as many as there are GPUs
    2: collectives_rs         collectives alone in two processes, on one GPU if there is no other
    2: tests                  of tests/test_gpu.py, in two processes
    1: unsharded, 1: ours...  a row for each way to train a Llama of 1.0B parameters in bf16, in one process
    1: predicted              what a report predicts of ours, what it takes, and what a profile records of it
    2: predicted, 2: ours...  the same in two processes, with a smaller Llama

Each part is printed and written to OUT/results.txt as it ends, so a run that is killed keeps what it has. A part that
fails prints its traceback, and one that hangs prints the stack of each thread. Then the next part runs, and the exit
code is 1. A part may use the time that parts before it left over, never the time that parts behind it need. `--quick`
runs each kind of part at a tiny size on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.launch import ENVIRONMENT, launch
from benchmarks.predicted import add_row, grid_of
from benchmarks.predicted_worker import Figures, PredictedJob
from benchmarks.records import Record, mean_losses, worst_deviation
from benchmarks.settings import Settings
from benchmarks.train_step import (
    Bench,
    exit_on_sigterm,
    gpu_environment,
    parse,
    settings_of,
    software_and_machine,
    title_of,
    tolerance_of,
)
from benchmarks.variants import VARIANTS

_ROOT = Path(__file__).resolve().parents[1]
_REFERENCE, _WIRE, _PREDICTED = "reference", "collectives_rs", "predicted"
_SECONDS = 520.0  # for all parts, so that a run takes less than nine minutes
_QUICK_SECONDS = 900.0  # enough whatever else the machine does; a part may take all of it
_LEAST_S = 10.0  # a part that has less left is not begun
_HANGS = 3  # a part that takes so many times what it needs gets no more, even if there is time to spare
_ENDS_S = 10.0  # from the signal that asks a test run to end to the one that kills it

# 1.0B parameters, as wide and as deep as Llama 3.2 1B. Two processes on one GPU send through the CPU's memory.
_LLAMA = "--dim 2048 --layers 16 --vocab 32000 --batch 4 --seq 2048 --steps 8 --warmup 3"
_SMALLER_LLAMA = "--dim 2048 --layers 3 --vocab 8192 --batch 2 --seq 1024 --steps 5 --warmup 2"
_TINY_LLAMA = "--dim 32 --layers 1 --vocab 64 --batch 1 --seq 16 --steps 2 --warmup 1"


class PartError(RuntimeError):
    """A part gave no result; the message says why."""


@dataclass(frozen=True)
class Part:
    name: str
    needs_s: float
    """What it is expected to take, and has whatever the parts before it do."""
    run: Callable[[float], None]
    """Told how many seconds it has."""

    def is_among(self, names: list[str]) -> bool:
        """Whether the part's name begins with one of ``names``. "2..." also takes the part that finds the backend."""
        return any(self.name.startswith(one) or (one.startswith("2") and _WIRE in self.name) for one in names)


class Results:
    """Prints results, and keeps all of them in a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.write_text("")

    def say(self, what: object) -> None:
        console = Console(file=io.StringIO(), width=200, soft_wrap=True, markup=False, highlight=False)
        console.print(what)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        print(text, end="", flush=True)
        with self._path.open("a") as file:
            file.write(text)


@dataclass
class World:
    """The setup for one number of processes, and what was measured with it."""

    bench: Bench
    settings: Settings
    options: argparse.Namespace
    work: Path
    records: dict[str, Record] = field(default_factory=dict)
    reference: list[float] = field(default_factory=list)


class Runner:
    """Runs the parts, the most valuable first."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._quick: bool = options.quick
        self._out: Path = options.out
        self._work = work
        self._results = Results(self._out / "results.txt")
        self._cores = sorted(os.sched_getaffinity(0))
        shared = work / "cache" / "shared"
        (shared / "rank0").mkdir(parents=True)
        if self._quick:
            (shared / "rank1").symlink_to("rank0")
        self._worlds = {1: self._world(1, "nccl"), 2: self._world(2, "nccl")}
        self._nccl_failed = False

    def parts(self) -> Iterator[Part]:
        def row(num_ranks: int, name: str, needs_s: float) -> Part:
            return Part(f"{num_ranks}: {name}", needs_s, partial(self._row, num_ranks, name))

        yield Part("tests", 80, partial(self._tests, ("test_gpu.py", "test_demo.py"), 1))
        yield Part(f"2: {_WIRE}", 15, partial(self._wire, 2))
        if not self._quick:
            yield Part("2: tests", 60, partial(self._tests, ("test_gpu.py",), 2))
        yield row(1, _REFERENCE, 10)
        if not self._quick:
            yield row(1, "unsharded", 40)
            yield row(1, "ours", 45)
            yield row(1, "fsdp2_blocks", 20)
            yield row(1, "ours_blocks", 20)
        yield row(1, "ours_eager", 15)
        if not self._quick:
            if find_spec("torchtitan") is not None:
                yield row(1, "simple_fsdp", 30)
            yield Part(f"1: {_PREDICTED}", 40, partial(self._predicted, 1))
        yield Part(f"2: {_PREDICTED}", 30, partial(self._predicted, 2))
        yield row(2, _REFERENCE, 10)
        if not self._quick:
            yield row(2, "ours", 20)
            yield row(2, "ours_eager", 15)
            yield row(2, "fsdp2_blocks", 15)
        yield row(2, "ours_blocks", 15)

    def run(self, seconds: float, only: list[str]) -> int:
        end = time.monotonic() + seconds
        failed = []
        self._results.say(_machine())
        parts = [part for part in self.parts() if not only or part.is_among(only)]
        try:
            for place, part in enumerate(parts):
                begun, left_s = time.monotonic(), end - time.monotonic()
                self._results.say(f"\n== {part.name}")
                try:
                    if left_s < _LEAST_S:
                        raise PartError(f"not begun: {left_s:.0f} s were left. Run it alone: --only '{part.name}'")
                    part.run(left_s if self._quick else limit_of(part, parts[place + 1 :], left_s))
                except PartError as error:
                    failed.append(part.name)
                    self._results.say(f"FAILED: {error}")
                except Exception:
                    failed.append(part.name)
                    self._results.say(f"FAILED: {traceback.format_exc()}")
                self._results.say(f"-- {part.name}: {time.monotonic() - begun:.1f} s")
        finally:  # also in a run that is ended from outside
            for num_ranks, world in self._worlds.items():
                if world.records:
                    self._table(num_ranks, world)
        self._results.say(f"\nfailed: {', '.join(failed)}" if failed else "\nall parts are well")
        return int(bool(failed))

    def _world(self, num_ranks: int, backend: str) -> World:
        if self._quick:
            size, where = _TINY_LLAMA, "--device cpu"
        else:
            size, where = _LLAMA if num_ranks == 1 else _SMALLER_LLAMA, f"--device cuda --backend {backend}"
        kinds = "--dtype bf16 --adamw fused --repeat 1 --cache shared"
        options = parse(f"{size} {where} {kinds} --ranks {num_ranks}".split())
        # Smaller steps than this hardly change weights in bfloat16, and larger ones upset a model of this size.
        settings = dataclasses.replace(settings_of(options), lr=1e-4)
        work = self._work / f"{num_ranks}-{backend}"
        work.mkdir()
        (work / "cache").symlink_to(self._work / "cache")  # shared: many kernels are the same
        bench = Bench(options, settings, None, self._cores, work)
        if self._quick:  # a forked process cannot use a GPU: transformers looks for one when it is imported
            bench.preload = (
                "benchmarks.worker",
                "benchmarks.predicted_worker",
                "transformers.models.llama.modeling_llama",
            )
        return World(bench, settings, options, work)

    def _tests(self, files: Sequence[str], num_ranks: int, limit_s: float) -> None:
        if num_ranks > 1 and self._nccl_failed:
            raise PartError("not begun: the tests are of NCCL, which did not take two processes here")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-v", "--durations=5"]
        command += [f"tests/{file}" for file in files]
        environment = {"FSDP_COMPILE_GPU_RANKS": str(num_ranks), "TORCHINDUCTOR_CACHE_DIR": str(self._work / "tests")}
        log = self._out / f"tests-of-{num_ranks}.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        late = False
        try:
            process.wait(limit_s - _ENDS_S)
        except subprocess.TimeoutExpired:
            late = True
            process.send_signal(signal.SIGINT)  # pytest then says what failed until now
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers end with it
            process.wait()
        said = log.read_text()
        if late or process.returncode:
            why = f"not done after {limit_s:.0f} s" if late else f"pytest ended with {process.returncode}"
            raise PartError(f"{why}\n{said}")
        self._results.say(said)

    def _wire(self, num_ranks: int, limit_s: float) -> None:
        """Measure collectives alone; where NCCL does not run them, this part and all that follow use gloo."""
        try:
            self._row(num_ranks, _WIRE, limit_s / 2)
        except PartError as error:
            if self._quick:
                raise
            self._results.say(f"Not over NCCL, so over gloo: {error}")
            self._nccl_failed = True
            self._worlds[num_ranks] = self._world(num_ranks, "gloo")
            self._row(num_ranks, _WIRE, limit_s / 2)

    def _row(self, num_ranks: int, name: str, limit_s: float) -> None:
        world = self._worlds[num_ranks]
        world.bench.limit_s = limit_s
        if name == _REFERENCE:
            outcome = world.bench.reference()
            if outcome.error:
                raise PartError(f"{outcome.error}\n{outcome.log_tail}")
            world.reference = mean_losses(outcome.ranks)
            self._results.say(f"losses of the plain model, eager: {_numbers(world.reference)}")
            return
        record = world.records[name] = Record(name, VARIANTS[name].about)
        world.bench.measure({name: record})
        if world.reference and (num_ranks == 1 or VARIANTS[name].has_loss_of_all):
            report.check_losses({name: record}, world.reference, tolerance_of(world.settings))
        if record.step_s is not None and record.spread_s is not None:
            step = "{:.4f} s a step ({:.4f} to {:.4f})".format(record.step_s, *record.spread_s)
            first_s = min(record.cold_first_step_s + record.warm_first_step_s)
            peak = "" if record.peak_bytes is None else f"; peak {record.peak_bytes / 1e9:.2f} GB"
            self._results.say(f"{step}; first step {first_s:.1f} s{peak}; {record.collectives or 'no collective'}")
            self._say_losses(record.losses[0], world)
        if record.problems:
            raise PartError("\n".join([*record.problems, record.log_tail]))
        self._say_log(record.log_tail)

    def _say_losses(self, losses: list[float], world: World) -> None:
        if not losses:
            return
        off = worst_deviation(losses, world.reference[: len(losses)])
        beside = f", off by {off:.1e} at most from the plain model's" if world.reference else ""
        self._results.say(f"losses {_numbers(losses)}{beside}")

    def _say_log(self, tail: str) -> None:
        if tail:
            self._results.say(f"the end of rank 0's output:\n{tail}")

    def _predicted(self, num_ranks: int, limit_s: float) -> None:
        world = self._worlds[num_ranks]
        on_gpu = world.settings.device == "cuda"
        traces = self._out / f"traces-of-{num_ranks}"
        shutil.rmtree(traces, ignore_errors=True)  # a profile needs a folder without another run's
        job = PredictedJob(
            variant="ours",
            mode="time",
            settings=world.settings,
            run_dir=str(world.work / _PREDICTED),
            address="127.0.0.1",
            interfaces=("lo",) * num_ranks,
            cores=() if on_gpu else tuple(self._cores[rank % len(self._cores)] for rank in range(num_ranks)),
            timeout_s=limit_s,
            traces=str(traces),
        )
        environment = gpu_environment(len(self._cores) // num_ranks) if on_gpu else {}
        cache = world.work / "cache" / "shared"
        module, preload = "benchmarks.predicted_worker", world.bench.preload
        outcome = launch(module, job, num_ranks, env=environment, cache_dir=cache, preload=preload)
        if outcome.error:
            raise PartError(f"{outcome.error}\n{outcome.log_tail}")
        grid = grid_of(title_of(world.options, world.settings))
        add_row(grid, "ours", outcome)
        self._results.say(grid)
        ranks: list[Figures] = list(outcome.ranks)  # type: ignore[arg-type]
        self._results.say(f"launches of the plan {ranks[0].planned}, of the profile {ranks[0].recorded}")
        self._results.say(ranks[0].summary)
        self._say_log(outcome.log_tail)
        if ranks[0].planned != ranks[0].recorded:
            raise PartError("the profile has other launches than the plan")

    def _table(self, num_ranks: int, world: World) -> None:
        environment = software_and_machine() | {"settings": dataclasses.asdict(world.settings)}
        title = title_of(world.options, world.settings)
        grid = report.table(world.records, world.reference, title=title, caption="", with_sent_bytes=False)
        self._results.say(grid)
        path = self._out / f"rows-of-{num_ranks}.json"
        report.save(path, grid, world.records, world.reference, environment)


def limit_of(part: Part, behind: Sequence[Part], left_s: float) -> float:
    """Return the seconds that a part may take: what it needs, and what the parts behind it leave over."""
    over_s = left_s - part.needs_s - sum(one.needs_s for one in behind)
    return min(part.needs_s + max(0.0, over_s), _HANGS * part.needs_s, left_s)


def main() -> int:
    options = _parse(sys.argv[1:])
    exit_on_sigterm()
    if options.quick:
        # g++ does not optimize kernels, and no GPU is visible: the question is only whether all parts run.
        os.environ.update(
            ENVIRONMENT, CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_VEC_ISA_OK="0", AOT_INDUCTOR_DEBUG_COMPILE="1"
        )
    elif not _has_gpu():
        print(
            "No GPU is visible to PyTorch here. Run this on a machine with one (and CUDA_VISIBLE_DEVICES unset), or "
            "run `python -m benchmarks.gpu --quick`, which does all parts at a tiny size on the CPU.",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-gpu-") as work:
        seconds = options.seconds or (_QUICK_SECONDS if options.quick else _SECONDS)
        return Runner(options, Path(work)).run(seconds, options.only)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _machine() -> str:
    """Return the machine and the versions of the software, on which the figures depend."""
    import torch

    versions = software_and_machine()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
    return f"{gpus or 'no GPU'}, NCCL {nccl}, CUDA {torch.version.cuda}, {versions}"


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="All that only a GPU can show: the tests, rows of training, predictions and a profile.",
    )
    parser.add_argument("--quick", action="store_true", help="all parts at a tiny size on the CPU")
    parser.add_argument("--seconds", type=float, help=f"of all parts; default: {_SECONDS:.0f}, or {_QUICK_SECONDS:.0f}")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="parts whose names begin so: tests, '1:', '2: ours'"
    )
    where = _ROOT / "benchmarks" / "results" / "gpu"
    parser.add_argument("--out", type=Path, default=where, metavar="FOLDER", help="default: benchmarks/results/gpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
