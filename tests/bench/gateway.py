"""What the gateway costs a call, beside nginx and the server asked directly: requests, streams, bodies, memory.

Every figure is taken in rounds, each of which asks all three one after the other, so that what is compared was measured
within moments; the medians of the rounds are told. Processor time is the process' own, from the kernel.
Run: `python -m tests.bench.gateway [--rounds 3] [--seconds 2] [--only NAME] [--json]`. Needs nginx, wrk and two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tests.bench.paced import Listener, listen
from tests.bench.stand import LOAD_CORE, Proxy, Stand, stand

STREAMS, IDLE_STREAMS, BODY_BYTES = 64, 1_000, 2_000_000
_LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
function done(summary, latency, requests)
  local bad = summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.timeout
  io.write(string.format('\\nRESULT {{"requests":%d,"us":%d,"p50":%.1f,"p99":%.1f,"bad":%d}}\\n', summary.requests,
    summary.duration, latency:percentile(50), latency:percentile(99), bad))
end
"""
Json = dict[str, object]


@dataclass(slots=True)
class Figures:
    """What was measured of one proxy in one scene: figure -> one value a round."""

    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, **figures: float) -> None:
        for name, value in figures.items():
            self.values.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.values.items()}


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    seconds: float
    folder: Path


Scene = dict[str, Figures]


def _wrk(proxy: Proxy, body: bytes, connections: int, options: Options) -> dict[str, float]:
    """Requests a second, latency in us, and the proxy's processor time a request in us."""
    script, file = options.folder / "load.lua", options.folder / "body"
    file.write_bytes(body)
    script.write_text(_LUA.format(body=file))
    url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
    load = ["wrk", "-t1", f"-c{connections}", f"-d{options.seconds}s", "-s", str(script), url]
    before = proxy.cpu_s()
    done = subprocess.run(["taskset", "-c", str(LOAD_CORE), *load], capture_output=True, text=True, check=True)
    cpu_us = (proxy.cpu_s() - before) * 1e6
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    told = cast("dict[str, float]", json.loads(line.removeprefix("RESULT ")))
    assert not told["bad"], (proxy.name, done.stdout)
    each = {"requests_s": told["requests"] / told["us"] * 1e6, "p50_us": told["p50"], "p99_us": told["p99"]}
    return {**each, "cpu_us": cpu_us / max(told["requests"], 1)}


def _short_body() -> bytes:
    return json.dumps({"model": "alpha", "messages": [{"role": "user", "content": "word " * 40}]}).encode()


def _large_body() -> bytes:
    texts = ["word and word, " * 330 for _ in range(BODY_BYTES // 5000)]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return json.dumps({"model": "alpha", "messages": messages}).encode()


def _asked(proxies: Sequence[Proxy], body: bytes, connections: int, options: Options) -> Scene:
    scene: Scene = {proxy.name: Figures() for proxy in proxies}
    for _ in range(options.rounds):
        for proxy in proxies:
            scene[proxy.name].add(**_wrk(proxy, body, connections, options))
    return scene


def many(put: Stand, options: Options) -> Scene:
    """Small calls on 32 connections."""
    return _asked([*put.short, put.indexed], _short_body(), 32, options)


def one(put: Stand, options: Options) -> Scene:
    """Small calls on one connection, one after the other."""
    return _asked([*put.short, put.indexed], _short_body(), 1, options)


def large(put: Stand, options: Options) -> Scene:
    """Bodies of 2 MB on 4 connections."""
    return _asked([*put.short, put.indexed], _large_body(), 4, options)


def paced(put: Stand, options: Options) -> Scene:
    """64 event streams of 200 chunks a second."""

    async def counted(proxy: Proxy) -> dict[str, float]:
        listeners = await listen(proxy.port, STREAMS)
        await asyncio.sleep(0.3)
        cpu, chunks = proxy.cpu_s(), sum(one.chunks for one in listeners)
        await asyncio.sleep(options.seconds)
        came, spent_us = sum(one.chunks for one in listeners) - chunks, (proxy.cpu_s() - cpu) * 1e6
        _close(listeners)
        return {"cpu_us": spent_us / came, "chunks_s": came / options.seconds}

    scene: Scene = {proxy.name: Figures() for proxy in put.paced}
    for _ in range(options.rounds):
        for proxy in put.paced:
            scene[proxy.name].add(**asyncio.run(counted(proxy)))
    return scene


def idle(put: Stand, options: Options) -> Scene:
    """Memory of 1,000 streams on which nothing comes, above the process before them; once: it is not given back."""

    async def opened(proxy: Proxy) -> dict[str, float]:
        before = proxy.rss_bytes()
        listeners = await listen(proxy.port, IDLE_STREAMS, idle=True)
        more = proxy.rss_bytes() - before
        _close(listeners)
        return {"mib": more / 2**20}

    scene: Scene = {}
    for proxy in put.paced[1:]:
        scene[proxy.name] = Figures()
        scene[proxy.name].add(**asyncio.run(opened(proxy)))
    return scene


def _close(listeners: Sequence[Listener]) -> None:
    for one in listeners:
        if one.transport is not None:
            one.transport.abort()


SCENES: dict[str, Callable[[Stand, Options], Scene]] = {
    "idle": idle, "many": many, "one": one, "paced": paced, "large": large,
}  # fmt: skip


def rows(scenes: dict[str, Scene]) -> list[Json]:
    """One a scene, proxy and figure; the ratio is to nginx's in the same scene."""
    found: list[Json] = []
    for name, scene in scenes.items():
        nginx = scene["nginx"].medians()
        for proxy, figures in scene.items():
            for figure, value in figures.medians().items():
                beside = nginx.get(figure)
                ratio = round(value / beside, 3) if beside else None
                row = {"scene": name, "proxy": proxy, "figure": figure}
                found.append({**row, "value": round(value, 2), "ratio": ratio})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--only", choices=[*SCENES], action="append")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stand(Path(folder)) as put:
        options = Options(asked.rounds, asked.seconds, Path(folder))
        told = rows({name: SCENES[name](put, options) for name in asked.only or SCENES})
    if asked.json:
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
        print(json.dumps({"bench": "gateway", "machine": machine, "rows": told}))
        return
    print(f"{'scene':7} {'proxy':24} {'figure':12} {'value':>12} {'x nginx':>8}")
    for row in told:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:8.2f}"
        print(f"{row['scene']:7} {row['proxy']:24} {row['figure']:12} {row['value']:12.2f} {ratio}")


if __name__ == "__main__":
    main()
