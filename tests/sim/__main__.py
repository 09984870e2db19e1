"""python -m tests.sim: run seeds, stop at the first that breaks a promise, and tell its story."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate


def main() -> int:
    """0 when all held."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--seeds", type=int, default=100, help="so many (100)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them (0)")
    parser.add_argument("--verbose", action="store_true", help="tell everything as it happens")
    parser.add_argument("--on", action="store_true", help="go on after one that failed")
    parser.add_argument("--lines", type=int, default=100, help="how much of a story is told (100)")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with this mechanism taken away")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
    began, failed, events = time.monotonic(), 0, 0
    for seed in seeds:
        verdict = simulate(seed, mutant=args.mutant, tell=print if args.verbose else None)
        events += verdict.events
        if verdict.broken is None:
            continue
        failed += 1
        print(f"seed {seed}: {verdict.broken}" if args.on or args.verbose else verdict.story(args.lines), flush=True)
        if not args.on:
            return 1
    print(f"{len(seeds)} seeds, {failed} failed, {events} events, {time.monotonic() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
