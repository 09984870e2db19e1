"""What swapper adds to a handover: 20 of them on the real server, interleaved with a bare script that does the same.

The bare script has no scheduler: save two slots, unload, wait on the router's SSE, load, wait, one token, restore two
slots, on a router of its own. swapper does that for a model of the same size, through its HTTP lease API with the
embedded store. Figures are per handover, out and back together; what counts is the paired difference within one run.
Run: `python -m tests.bench.handover [--rounds 20] [--json]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp

from swapper.demo.models import make_models
from tests.support.router import RealRouter
from tests.support.server import Server

OURS, BARE = "alpha", "beta"
TURN = "please go on with the story "
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Pair:
    """One round, milliseconds: swapper out, swapper back, and the bare script."""

    out: float
    back: float
    bare: float

    @property
    def added(self) -> float:
        return self.out + self.back - self.bare


class Sse:
    """The `data:` lines of one SSE stream, as JSON."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def until(self, **wanted: object) -> Json:
        """The first message from here on that has these values (one level of `data` is searched too)."""
        async for line in self._answer.content:
            if line.startswith(b"data:"):
                message = cast("Json", json.loads(line[5:]))
                flat = {**message, **cast("Json", message.get("data") or {})}
                if all(flat.get(key) == value for key, value in wanted.items()):
                    return message
        raise AssertionError("the stream ended")


@asynccontextmanager
async def sse(session: aiohttp.ClientSession, url: str) -> AsyncGenerator[Sse]:
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
        yield Sse(answer)


async def post(session: aiohttp.ClientSession, url: str, body: Json) -> Json:
    async with session.post(url, json=body) as answer:
        said = cast("Json", await answer.json(content_type=None))
        assert answer.status < 300, said
        return said


async def bare(session: aiohttp.ClientSession, router: str, changes: Sse, number: int) -> float:
    """The same work, one call after the other; milliseconds."""
    start = time.perf_counter()
    names = [f"bare-{number}-{slot}.kv" for slot in range(2)]
    for slot, name in enumerate(names):
        await post(session, f"{router}/slots/{slot}?action=save", {"model": BARE, "filename": name})
    await post(session, f"{router}/models/unload", {"model": BARE})
    await changes.until(model=BARE, status="unloaded")
    await post(session, f"{router}/models/load", {"model": BARE})
    await changes.until(model=BARE, status="loaded")
    await post(session, f"{router}/completion", {"model": BARE, "prompt": "a", "n_predict": 1})
    for slot, name in enumerate(names):
        await post(session, f"{router}/slots/{slot}?action=restore", {"model": BARE, "filename": name})
    return (time.perf_counter() - start) * 1000


async def ours(session: aiohttp.ClientSession, server: str, events: Sse) -> tuple[float, float]:
    """One lease, granted and released at once; milliseconds out and back."""
    start = time.perf_counter()
    lease = await post(session, f"{server}/api/leases?wait=60", {"card": "gpu0", "label": "bench"})
    assert lease["state"] == "granted", lease
    out = time.perf_counter()
    async with session.delete(f"{server}/api/leases/{lease['id']}?token={lease['token']}") as answer:
        assert answer.status == 200
    while (swap := await events.until(lease=lease["id"], outcome="done"))["to"] != [f"llama/{OURS}"]:
        pass
    talks = cast("list[Json]", swap["conversations"])
    assert len(talks) == 2, talks
    assert all(talk["restored"] for talk in talks), talks
    return (out - start) * 1000, (time.perf_counter() - out) * 1000


async def talk(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Fill both slots, pinned so that no conversation takes the other's."""
    for slot in range(2):
        prompt = f"{slot} " + TURN * 60
        await post(session, f"{url}/completion", {"model": model, "prompt": prompt, "n_predict": 4, "id_slot": slot})


async def rounds(router: RealRouter, server: Server, count: int) -> list[Pair]:
    """`router` is the bare script's."""
    async with (
        aiohttp.ClientSession() as session,
        sse(session, f"{router.url}/models/sse") as changes,
        sse(session, f"{server.url}/api/events") as events,
    ):
        await post(session, f"{router.url}/models/load", {"model": BARE})
        await changes.until(model=BARE, status="loaded")
        await talk(session, router.url, BARE)
        await talk(session, server.url, OURS)
        pairs: list[Pair] = []
        for number in range(-1, count):
            script = await bare(session, router.url, changes, number)
            out, back = await ours(session, server.url, events)
            if number >= 0:  # the first round warms the page cache
                pairs.append(Pair(out, back, script))
        return pairs


def fsync_ms(folder: Path) -> float:
    """Median of 50 appends of 300 bytes, each made durable: what every commit of the embedded store pays."""
    times: list[float] = []
    with (folder / "fsync").open("ab", buffering=0) as file:
        for _ in range(50):
            file.write(b"x" * 300)
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def row(name: str, ours_ms: list[float], bare_ms: list[float]) -> Json:
    own, base = statistics.median(ours_ms), statistics.median(bare_ms)
    return {"row": name, "ms_p50": round(own, 1), "bare_ms_p50": round(base, 1), "ratio": round(own / base, 3)}


def report(pairs: list[Pair], disk_ms: float) -> Json:
    added = sorted(pair.added for pair in pairs)
    rows = [row("out and back", [p.out + p.back for p in pairs], [p.bare for p in pairs])]
    rows[0] |= {
        "added_ms_p50": round(statistics.median(added), 1),
        "added_ms_max": round(added[-1], 1),
        "out_ms_p50": round(statistics.median(p.out for p in pairs), 1),
        "back_ms_p50": round(statistics.median(p.back for p in pairs), 1),
        "handovers": len(pairs),
        "fdatasync_ms_p50": round(disk_ms, 3),
    }
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    return {"bench": "handover", "machine": machine, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = make_models(folder, [OURS, BARE])
        router, apart = (
            RealRouter(folder / f"router-{name}", {name: models[name]}, defaults={"threads": "1"})
            for name in (OURS, BARE)
        )
        server = Server(folder / "swapper", router, {OURS: "{vram: 8GiB, default: true}"})
        try:
            router.start()
            apart.start()
            server.start()
            disk_ms = fsync_ms(folder)
            result = report(asyncio.run(rounds(apart, server, args.rounds)), disk_ms)
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
