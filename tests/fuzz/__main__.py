"""As many seeds as one likes: `python -m tests.fuzz --seeds 10000 [--first N]`, or one: `--seed N`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.fuzz.check import Judge
from tests.fuzz.requests import sent_by
from tests.support.liedserve import attacked


async def run(seeds: range, *, told: bool) -> int:
    """How many of them failed; each that does is told."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        async with attacked(Path(folder)) as made:
            judge = Judge(made)
            for seed in seeds:
                sent = sent_by(seed)
                if told:
                    print(*sent.pieces, sep="\n---\n")
                try:
                    await judge.check(sent)
                except Exception as error:
                    failed += 1
                    print(f"seed {seed}: {error!r}\n  {sent.whole[:2000]!r}", flush=True)
                    made.liar.nonsense.clear()
                    made.liar.heard.clear()
    return failed


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    one = given.seed is not None
    seeds = range(given.seed, given.seed + 1) if one else range(given.first, given.first + given.seeds)
    failed = asyncio.run(run(seeds, told=one))
    print(f"{len(seeds)} seeds, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
