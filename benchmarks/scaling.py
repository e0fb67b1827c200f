"""`python -m benchmarks.scaling`: seconds of an operation by the number of parameters, beside torch's FSDP2 and FSDP1.

A model of n linear layers without bias is one unit, or has a unit for each layer. Two ranks talk over gloo, and the
seconds are processor time of the first. A size is left out (-) where the size before took too long. The exit code is 1
where ours takes more than MOST_TIMES as long as torch's, and more than NOTHING_S.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_compile
from fsdp_compile.fsdp1 import FullyShardedDataParallel as OurFSDP1
from tests.ranks import Ranks

SIZES, QUICK_SIZES = (500, 1000, 2000, 4000), (16, 32)
LAYOUTS = ("one unit", "as many units")
MOST_TIMES, NOTHING_S = 3.0, 0.05
PATIENCE_S = 5.0
NEEDED = ("fully_shard", "wrap", "first step", "state_dict", "get_", "optim_state_dict")  # later operations need these
DIM = 4

Cell = tuple[float, float] | None  # ours, torch's; None where the size before took too long


class Subject:
    """One model, and the operations that are timed on it in turn."""

    def __init__(self, num_params: int, layout: str) -> None:
        self.num_params, self.layout = num_params, layout
        self.module: Any = None
        self.optim: Any = None
        self.kept: Any = None  # what one operation leaves to the next

    def plain(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(self.num_params)))

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.module(torch.ones(2, DIM)).sum()
        return loss

    def operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield the name of each operation and its call. What a call needs is made before it, outside of calls."""
        raise NotImplementedError

    def steps(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        self.optim = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        yield "first step", lambda: self.loss().backward()
        self.module.zero_grad()
        yield "step", lambda: self.loss().backward()
        yield "clip_grad_norm_", self.clip
        yield "optimizer.step", self.optim.step
        yield "no_sync and a step", self.accumulate
        yield "zero_grad", self.module.zero_grad

    def state_dicts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "state_dict", lambda: self.keep(self.module.state_dict())
        yield "load_state_dict", lambda: self.module.load_state_dict(self.kept)

    def checkpoints(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        module, optim = self.module, self.optim
        yield "get_model_state_dict", lambda: self.keep(helpers.get_model_state_dict(module))
        yield "set_model_state_dict", lambda: helpers.set_model_state_dict(module, self.kept)
        yield "get_optimizer_state_dict", lambda: self.keep(helpers.get_optimizer_state_dict(module, optim))
        yield "set_optimizer_state_dict", lambda: helpers.set_optimizer_state_dict(module, optim, self.kept)
        whole = helpers.StateDictOptions(full_state_dict=True)
        yield "get_model_state_dict, full", lambda: self.keep(helpers.get_model_state_dict(module, options=whole))
        yield "set_model_state_dict, full", lambda: helpers.set_model_state_dict(module, self.kept, options=whole)

    def casts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "to(bfloat16)", lambda: self.module.to(torch.bfloat16)
        yield "to_empty", lambda: self.module.to_empty(device="cpu")

    def keep(self, made: Any) -> None:
        self.kept = made

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)

    def accumulate(self) -> None:
        raise NotImplementedError


class FSDP2(Subject):
    fully_shard: Any = staticmethod(torch_fsdp.fully_shard)

    def operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        self.module = self.plain()
        yield "fully_shard", lambda: self.shard(self.module)
        yield from self.steps()
        yield from self.state_dicts()
        yield from self.checkpoints()
        yield "deepcopy", functools.partial(copy.deepcopy, self.copied())
        yield "full_params", self.whole
        self.kept = self.module.state_dict()
        yield "load_state_dict(assign=True)", lambda: self.module.load_state_dict(self.kept, assign=True)
        yield from self.casts()
        yield "to_empty, module by module", self.empty_each
        with torch.device("meta"):
            self.module = self.plain()
        self.shard(self.module)
        yield "materialize", self.materialize
        self.module = torch.compile(self.for_a_graph(), backend="eager")
        yield "traced by Dynamo, two steps", lambda: [self.loss().backward() for _ in range(2)]
        torch._dynamo.reset()

    def shard(self, module: Any) -> None:
        if self.layout == "as many units":
            for layer in module:
                self.fully_shard(layer)
        self.fully_shard(module)

    def accumulate(self) -> None:
        self.module.set_requires_gradient_sync(False)
        self.loss().backward()
        self.module.set_requires_gradient_sync(True)
        self.loss().backward()

    def empty_each(self) -> None:
        for one in self.module.modules():
            one.to_empty(device="cpu", recurse=False)

    def whole(self) -> None:
        for param in self.module.parameters():
            param.full_tensor()

    def copied(self) -> nn.Module:
        return self.plain()  # FSDP2's modules refuse to be copied

    def for_a_graph(self) -> nn.Module:
        return self.plain()  # FSDP2's hooks would break the graph at each layer

    def materialize(self) -> None:
        self.module.to_empty(device="cpu")
        for layer in self.module:
            layer.reset_parameters()


class Ours(FSDP2):
    fully_shard = staticmethod(fsdp_compile.fully_shard)

    def shard(self, module: Any) -> None:
        if self.layout == "as many units":
            fsdp_compile.auto_shard(module, nn.Linear)
        else:
            self.fully_shard(module)

    def clip(self) -> None:
        fsdp_compile.clip_grad_norm_(self.module, 1.0)

    def whole(self) -> None:
        with fsdp_compile.full_params(self.module):
            pass

    def copied(self) -> nn.Module:
        module: nn.Module = self.module
        return module

    def for_a_graph(self) -> nn.Module:
        module = self.plain()
        self.shard(module)
        return module

    def materialize(self) -> None:
        fsdp_compile.materialize(self.module)


class FSDP1(Subject):
    cls: Any = torch_fsdp.FullyShardedDataParallel

    def operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        plain = self.plain()
        policy = ModuleWrapPolicy({nn.Linear}) if self.layout == "as many units" else None
        yield "wrap", lambda: self.wrap(plain, policy)
        yield from self.steps()
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            self.cls.set_state_dict_type(self.module, torch_fsdp.StateDictType[kind])
            for name, call in self.state_dicts():
                yield f"{name}, {kind.split('_')[0]}", call
            yield (
                f"optim_state_dict, {kind.split('_')[0]}",
                lambda: self.keep(self.cls.optim_state_dict(self.module, self.optim)),
            )
            yield (
                f"optim_state_dict_to_load, {kind.split('_')[0]}",
                lambda: self.cls.optim_state_dict_to_load(self.module, self.optim, self.kept),
            )
        yield from self.checkpoints()
        yield "summon_full_params", self.summon
        yield from self.casts()

    def wrap(self, plain: nn.Module, policy: Any) -> None:
        self.module = self.cls(plain, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))

    def clip(self) -> None:
        self.module.clip_grad_norm_(1.0)

    def accumulate(self) -> None:
        with self.module.no_sync():
            self.loss().backward()
        self.loss().backward()

    def summon(self) -> None:
        with self.cls.summon_full_params(self.module):
            pass


class OurFSDP1s(FSDP1):
    cls = OurFSDP1


PAIRS: dict[str, tuple[type[Subject], type[Subject]]] = {"FSDP2": (Ours, FSDP2), "FSDP1": (OurFSDP1s, FSDP1)}


def measure(kind: type[Subject], size: int, layout: str, left_out: Collection[str]) -> dict[str, float]:
    """Return processor seconds by operation."""
    warnings.simplefilter("ignore")
    for _, call in kind(2, layout).operations():
        call()  # on a small model, to import what the call needs
    subject = kind(size, layout)
    seconds: dict[str, float] = {}
    for name, call in subject.operations():
        if name not in left_out or name.startswith(NEEDED):
            gc.collect()
            gc.freeze()  # garbage collections in a call then look only at what the call makes
            began = time.process_time()
            call()
            seconds[name] = time.process_time() - began
    gc.unfreeze()
    return seconds


def compared(
    ranks: Ranks, pair: str, layout: str, sizes: Sequence[int], repeats: int, show: Callable[[str], None]
) -> dict[str, list[Cell]]:
    """Return, by operation, the seconds of ours and of torch's at each size, as medians of several models."""
    rows: dict[str, list[Cell]] = {}
    too_slow: set[str] = set()
    for size in sizes:
        show(f"{pair}, {layout}: {size} parameters")
        runs: list[list[dict[str, float]]] = [[], []]
        for _ in range(repeats):  # ours and theirs in turn, so that other programs slow both alike
            for kind, its in zip(PAIRS[pair], runs):
                its.append(ranks.run(measure, kind, size, layout, too_slow, limit_s=3600)[0])
        taken, their = ({name: statistics.median(one[name] for one in its) for name in its[0]} for its in runs)
        for name in dict.fromkeys([*rows, *taken]):
            rows.setdefault(name, []).append((taken[name], their[name]) if name in taken else None)
        too_slow |= {name for of_one in (taken, their) for name, seconds in of_one.items() if seconds > PATIENCE_S}
    return rows


def is_slow(cell: Cell) -> bool:
    return cell is not None and cell[0] > NOTHING_S and cell[0] > MOST_TIMES * cell[1]


def shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    ours, theirs = cell
    text = f"{ours:.2f} / {theirs:.2f} = {ours / max(theirs, 1e-3):.1f}"
    return f"[bold]{text}[/bold]" if is_slow(cell) else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes alone, to see that it runs")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=1, help="models of each kind and size, since one varies by half")
    parser.add_argument("--pair", choices=list(PAIRS), nargs="+", default=list(PAIRS))
    parser.add_argument("--layout", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    asked = parser.parse_args()
    sizes = asked.sizes or (QUICK_SIZES if asked.quick else SIZES)
    console = Console(width=max(150, Console().width))
    slow = False
    with Ranks(2) as ranks:
        for pair in asked.pair:
            for layout in asked.layout:
                with console.status("") as status:
                    rows = compared(ranks, pair, layout, sizes, asked.repeats, status.update)
                table = Table(title=f"{layout}: seconds of ours / of torch's {pair} = ratio")
                table.add_column("operation")
                for size in sizes:
                    table.add_column(f"{size} parameters", justify="right")
                for name, cells in rows.items():
                    table.add_row(name, *map(shown, cells))
                    slow |= any(map(is_slow, cells))
                console.print(table)
    return 1 if slow and not asked.quick else 0


if __name__ == "__main__":
    sys.exit(main())
