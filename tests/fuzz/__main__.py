"""`python -m tests.fuzz`: see the package."""

from __future__ import annotations

import argparse
import collections
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.cases import MODES, Block, Case, Step, cases
from tests.fuzz.play import Crews

WITH_ONE_SEED = 100  # cases, at most


class Unknown(AssertionError):
    """A failure whose cause was not seen before: hypothesis looks for a smaller case of it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("case", nargs="?", help="the text of one case, to play it alone")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--backends", nargs="+", default=["aot_eager"])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--mixed", action="store_true", help="ranks run in different modes, in half of the cases")
    parser.add_argument("--no-shrink", action="store_true", help="print each cause's first case as it was drawn")
    args = parser.parse_args()
    crews = Crews()
    try:
        if args.case:
            trouble = crews.trouble_with(eval(args.case, {"Block": Block, "Case": Case, "Step": Step}))
            print(trouble or "as unsharded")
            return bool(trouble)
        return _play_many(crews, args)
    finally:
        crews.stop()


class Search:
    """Plays what hypothesis draws, and keeps the smallest case of each cause."""

    def __init__(self, crews: Crews, limit: int) -> None:
        self._crews, self._limit = crews, limit
        self.played = 0
        self.finding = ""  # the cause of which hypothesis looks for a smaller case
        self.smallest: dict[str, tuple[Case, str]] = {}
        self.seen: collections.Counter[str] = collections.Counter()

    def __call__(self, case: Case) -> None:
        if self.played >= self._limit and not self.finding:
            return
        trouble = self._crews.trouble_with(case)
        cause = trouble.partition("\n")[0]
        if not self.finding:
            self.played += 1
            self.seen[cause] += bool(cause)
            self.finding = cause if cause not in self.smallest else ""
        if self.finding and cause == self.finding:
            if cause not in self.smallest or len(repr(case)) <= len(repr(self.smallest[cause][0])):
                self.smallest[cause] = case, trouble
            raise Unknown(cause)


def _play_many(crews: Crews, args: argparse.Namespace) -> int:
    search, began, number = Search(crews, args.cases), time.monotonic(), args.seed
    phases = [Phase.generate] if args.no_shrink else [Phase.generate, Phase.shrink]
    strategy = cases(tuple(args.ranks), tuple(args.backends), tuple(args.modes), args.mixed)
    while search.played < args.cases:
        options = settings(
            max_examples=min(WITH_ONE_SEED, args.cases - search.played), deadline=None, database=None, phases=phases,
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        )  # fmt: skip

        def one(case: Case) -> None:
            search(case)

        try:
            seed(number)(options(given(strategy)(one)))()
        except Unknown:
            smallest, _ = search.smallest[search.finding]
            print(f"{search.played} cases, seed {number}: {search.finding}\n    {smallest!r}", flush=True)
        search.finding = ""
        number += 1
    _print(search, time.monotonic() - began)
    return bool(search.smallest)


def _print(search: Search, seconds: float) -> None:
    failed = f"{sum(search.seen.values())} failed, by {len(search.smallest)} causes"
    print(f"\n{search.played} cases in {seconds:.0f} s, {failed}")
    for cause, (case, trouble) in search.smallest.items():
        print(f"\n== {search.seen[cause]}: {cause}\npython -m tests.fuzz {repr(case)!r}\n{trouble}")


if __name__ == "__main__":
    sys.exit(main())
