"""What swapper adds to a swap by name: calls of one model while the other has the card, by turns, on a real router.

Two models of which one fits, two conversations of each in its slots. A round is a call of beta and then one of alpha,
each the next turn of a conversation that must come back with its model; the bare script does the same with a router of
its own and no scheduler: save, unload, load, one token, restore, call. What counts is the paired difference a swap.
Run: `python -m tests.bench.by_name [--rounds 20] [--json]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp

from swapper.demo.models import make_models
from tests.bench.handover import Json, Sse, post, sse
from tests.support.router import RealRouter
from tests.support.server import Server

ALPHA, BETA = "alpha", "beta"
TURN = "please go on with the story "


@dataclass(frozen=True, slots=True)
class Pair:
    """One swap by name, ms: through swapper and by the bare script; `read`: prompt tokens read anew by ours."""

    ours: float
    bare: float
    read: int


def prompt(slot: int) -> str:
    return f"{slot} " + TURN * 60


async def call(session: aiohttp.ClientSession, url: str, model: str, slot: int = 0) -> Json:
    """The next turn of a conversation, one token."""
    body: Json = {"model": model, "prompt": prompt(slot), "n_predict": 1, "id_slot": slot, "temperature": 0}
    return await post(session, f"{url}/completion", body)


async def by_name(session: aiohttp.ClientSession, url: str, model: str) -> tuple[float, int]:
    start = time.perf_counter()
    answer = await call(session, url, model)
    ms = (time.perf_counter() - start) * 1000
    return ms, int(cast("dict[str, int]", answer["timings"])["prompt_n"])


async def by_script(session: aiohttp.ClientSession, router: str, changes: Sse, leaves: str, comes: str) -> float:
    start = time.perf_counter()
    for slot in range(2):
        saved: Json = {"model": leaves, "filename": f"{leaves}-{slot}"}
        await post(session, f"{router}/slots/{slot}?action=save", saved)
    await post(session, f"{router}/models/unload", {"model": leaves})
    await changes.until(model=leaves, status="unloaded")
    await post(session, f"{router}/models/load", {"model": comes})
    await changes.until(model=comes, status="loaded")
    await post(session, f"{router}/completion", {"model": comes, "prompt": "a", "n_predict": 1})
    for slot in range(2):
        await post(session, f"{router}/slots/{slot}?action=restore", {"model": comes, "filename": f"{comes}-{slot}"})
    await call(session, router, comes)
    return (time.perf_counter() - start) * 1000


async def rounds(router: RealRouter, server: Server, count: int) -> list[Pair]:
    """`router` is the bare script's."""
    async with aiohttp.ClientSession() as session, sse(session, f"{router.url}/models/sse") as changes:
        for model in (BETA, ALPHA):
            await post(session, f"{router.url}/models/load", {"model": model})
            await changes.until(model=model, status="loaded")
            for slot in range(2):
                await call(session, router.url, model, slot)
                await call(session, server.url, model, slot)
                saved: Json = {"model": model, "filename": f"{model}-{slot}"}
                await post(session, f"{router.url}/slots/{slot}?action=save", saved)
            if model == BETA:
                await post(session, f"{router.url}/models/unload", {"model": BETA})
                await changes.until(model=BETA, status="unloaded")
        pairs: list[Pair] = []
        for number in range(-1, count):
            for leaves, comes in ((ALPHA, BETA), (BETA, ALPHA)):
                script = await by_script(session, router.url, changes, leaves, comes)
                ours, read = await by_name(session, server.url, comes)
                if number >= 0:  # the first round warms the page cache
                    pairs.append(Pair(ours, script, read))
        return pairs


def report(pairs: list[Pair]) -> Json:
    added = sorted(pair.ours - pair.bare for pair in pairs)
    ours, bare = (statistics.median(times) for times in ([p.ours for p in pairs], [p.bare for p in pairs]))
    row: Json = {
        "row": "a swap by name",
        "ms_p50": round(ours, 1),
        "bare_ms_p50": round(bare, 1),
        "ratio": round(ours / bare, 3),
        "added_ms_p50": round(statistics.median(added), 1),
        "added_ms_max": round(added[-1], 1),
        "warm": f"{sum(pair.read <= 2 for pair in pairs)} of {len(pairs)}",
    }
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    return {"bench": "by_name", "machine": machine, "rows": [row]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = make_models(folder, [ALPHA, BETA])
        router, apart = (
            RealRouter(folder / f"router-{name}", models, defaults={"threads": "1"}) for name in ("ours", "bare")
        )
        traits = {ALPHA: "{vram: 16GiB, default: true}", BETA: "{vram: 16GiB}"}
        server = Server(folder / "swapper", router, traits)
        try:
            router.start()
            apart.start()
            server.start()
            result = report(asyncio.run(rounds(apart, server, args.rounds)))
        finally:
            server.stop()
            router.stop()
            apart.stop()
    if args.json:
        print(json.dumps(result))
        return
    for line in cast("list[Json]", result["rows"]):
        print("  ".join(f"{key}={value}" for key, value in line.items()))


if __name__ == "__main__":
    main()
