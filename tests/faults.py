"""Raise at one line of ours after another, on both ranks: the next step is right, or a warning says what was lost.

``python -m tests.faults --modes eager "eager, no_sync" --every 10``: each line that a step runs is a place to raise,
as often as it runs. Shards are even, so that both ranks run the same lines.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.comparing import full, loss_of, reference_backward
from tests.models import Checkpointed, EvenBlock, Stack, pair
from tests.ranks import Ranks

MODES = ("eager", "eager, no_sync", "eager, checkpointed", "blocks", "blocks, no_sync", "whole")
ERRORS = {"KeyError": KeyError, "KeyboardInterrupt": KeyboardInterrupt}
OURS = ("/fsdp_compile/eager/", "/fsdp_compile/graph/", "/fsdp_compile/core/", "/passes/wire/")

Place = tuple[str, int, int]  # file, line, and how often the line ran before


class Fault:
    """A trace function that raises at a place; without one, it notes the places that there are."""

    def __init__(self, place: Place | None = None, error: type[BaseException] = KeyError) -> None:
        self.places: list[Place] = []
        self.hit = False
        self._place, self._error = place, error
        self._times: dict[tuple[str, int], int] = {}

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if any(one in frame.f_code.co_filename for one in OURS) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            place = (*line, self._times.get(line, 0))
            self._times[line] = place[2] + 1
            if self._place is None:
                self.places.append(place)
            elif place == self._place:
                self.hit = True
                raise self._error("a fault")
        return self._line

    def strikes(self, run: Callable[[], object]) -> None:
        """Run with it, and swallow what it raises."""
        sys.settrace(self)
        try:
            run()
        except BaseException:
            if not self.hit:
                raise
        finally:
            sys.settrace(None)


def survive(mode: str, error: str, every: int, backend: str = "aot_eager") -> list[str]:
    """Return the places after which the next step was not right; run it on two ranks."""
    unsharded, model = pair(make=lambda: (Checkpointed if "checkpointed" in mode else Stack)(vocab=32, block=EvenBlock))
    run: nn.Module = torch.compile(model, backend=backend) if mode == "whole" else model
    for layer in model.layers if "blocks" in mode else ():
        layer.compile(backend=backend)
    batches = [torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    reference_backward(unsharded, torch.stack(batches))
    expected = {name: param.grad for name, param in unsharded.named_parameters()}

    def step() -> None:
        loss_of(run(batches[dist.get_rank()])).backward()

    def steps() -> None:
        if "no_sync" in mode:
            model.set_requires_gradient_sync(False)
            step()
            model.set_requires_gradient_sync(True)
        step()

    def trouble() -> str:
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        if "no_sync" in mode:
            model.reset_iter_state()
        try:
            step()
        except Exception:
            return traceback.format_exc(limit=-3)
        grads = {name: param.grad for name, param in model.named_parameters()}
        wrong = [name for name, grad in grads.items() if grad is None or not torch.allclose(full(grad), expected[name], atol=1e-5)]  # type: ignore[arg-type]
        return f"wrong gradients of {', '.join(wrong)}" if wrong else ""

    for _ in range(3):
        assert not trouble()
    noted = Fault()
    noted.strikes(steps)
    box = [noted.places]
    dist.broadcast_object_list(box)
    found = []
    for place in box[0][::every]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step that raised warns of what is lost
            Fault(place, ERRORS[error]).strikes(steps)
            said = trouble()
        if said:
            found.append(f"{place[0]}:{place[1]}, time {place[2]}: {said}")
    return [f"{len(box[0])} places", *found]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--errors", nargs="+", default=[*ERRORS], choices=[*ERRORS])
    parser.add_argument("--every", type=int, default=10)
    args = parser.parse_args()
    ranks = Ranks(2)
    failed = False
    try:
        for mode in args.modes:
            for error in args.errors:
                said, *found = ranks.run(survive, mode, error, args.every, limit_s=3600)[0]
                failed |= bool(found)
                print(f"{mode}, {error}: {said}, {len(found)} of them wrong", *found, sep="\n  ", flush=True)
    finally:
        ranks.stop()
    return failed


if __name__ == "__main__":
    sys.exit(main())
