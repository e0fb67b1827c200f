"""`python -m tests.fuzz`: see the package."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.cases import MODES, Block, Case, Step, cases
from tests.fuzz.play import Crews, check

WITH_ONE_SEED = 100  # cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("case", nargs="?", help="the text of one case, to play it alone")
    parser.add_argument("--cases", type=int, default=WITH_ONE_SEED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--backends", nargs="+", default=["aot_eager"])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--mixed", action="store_true", help="each rank draws its mode; the cases have nothing that docs/ranks-that-differ.md lists")
    args = parser.parse_args()
    crews = Crews()
    failed = False
    try:
        if args.case:
            trouble = crews.trouble_with(eval(args.case, {"Block": Block, "Case": Case, "Step": Step}))
            print(trouble or "as unsharded")
            return bool(trouble)
        drawn = cases(tuple(args.ranks), tuple(args.backends), tuple(args.modes), args.mixed)
        for place in range(0, args.cases, WITH_ONE_SEED):
            seed, num_cases = args.seed + place // WITH_ONE_SEED, min(WITH_ONE_SEED, args.cases - place)
            try:
                check(crews, drawn, num_cases, seed)
                print(f"seed {seed}: {num_cases} cases are as unsharded", flush=True)
            except AssertionError as error:
                failed = True
                print(f"seed {seed}: {error}\n", flush=True)
    finally:
        crews.stop()
    return failed


if __name__ == "__main__":
    sys.exit(main())
