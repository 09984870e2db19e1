"""Handover after handover on the fast fake: what a serve, its store and their folders hold stays what it was.

`SWAPPER_HANDOVERS=1000` makes the first test as long as the promise says; it takes about four minutes then.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import aiohttp
import psutil
import pytest

from swapper.app import running
from swapper.config import load
from swapper.demo.models import make_models
from swapper.store import embedded
from tests.support.fake_server import FakeServer, fake_processes
from tests.support.leaks import Footprint, footprint, grown
from tests.support.router import RealRouter
from tests.support.server import ALPHA, Json, Server

WARM_UP = 100
HANDOVERS = int(os.environ.get("SWAPPER_HANDOVERS", "200"))
PASSING = {"fds": 4, "store_fds": 2, "connections": 4, "threads": 2}
"""What a swap that is just running, or one call, may have open."""
KIB, MIB = 1024, 1024 * 1024


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    router = FakeServer(tmp_path / "router", make_models(tmp_path, ["alpha"]))
    router.start()
    server = Server(tmp_path / "swapper", cast("RealRouter", router), ALPHA)
    try:
        yield server
    finally:
        server.stop()
        router.stop()


class Caller:
    """Talks to the model, takes the card and gives it back, all on one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def handover(self, number: int) -> None:
        talk = [{"role": "user", "content": f"hello {number}"}]
        body = {"model": "alpha", "messages": talk, "max_tokens": 4}
        assert self._ask("POST", "/v1/chat/completions", body)["choices"]
        lease = self._ask("POST", "/api/leases?wait=30", {"card": "gpu0", "label": f"number {number}"})
        assert lease["state"] == "granted", lease
        self._ask("DELETE", f"/api/leases/{lease['id']}?token={lease['token']}")

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        headers = {"Content-Type": "application/json"} if body else {}
        self._connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status < 300, text
        return cast("Json", json.loads(text))


@pytest.mark.timeout(120 + HANDOVERS)
def test_a_serve_holds_after_many_handovers_what_it_held_after_a_few(server: Server) -> None:
    server.start()
    found = embedded.running(server.state_dir)
    assert found is not None
    serve, store = psutil.Process(server.pid), psutil.Process(found.pid)

    def look() -> Footprint:
        server.chat("alpha", "are you there")
        return footprint(serve, store, server.state_dir, server.router.slot_dir)

    caller, series = Caller(server.port), list[Footprint]()
    for number in range(1, HANDOVERS + 1):
        caller.handover(number)
        if number % WARM_UP == 0:
            series.append(look())
            print(f"after {number}: {series[-1]}")
    caller.close()
    before, after = series[0], series[-1]
    assert grown(before, after, _allowed(HANDOVERS - WARM_UP)) == []


def _allowed(more: int) -> dict[str, int]:
    """Where something is kept for a while, so many bytes until as many are kept as ever will be.

    The store keeps 10,000 events (those of some 400 handovers), 1,000 swaps and 10,000 ended leases; its file grows by
    what is written, and is written anew beyond 64 MiB; serve keeps the leases it read last. A slot has two files.
    """
    return PASSING | {
        "rss": 4 * MIB + 8 * KIB * more,
        "store_rss": 4 * MIB + 64 * KIB * min(more, 400) + 16 * KIB * more,
        "state_bytes": min(256 * KIB * more, 96 * MIB),
        "slot_files": 4,
        "slot_bytes": 16 * KIB,
    }


async def test_no_task_outlives_its_handover(server: Server) -> None:
    """The same in this process, where tasks can be counted."""
    with fake_processes():
        async with running(load(server.config, {})) as swapper, aiohttp.ClientSession() as session:
            for number in range(10):
                await _handover(session, swapper.url, number)
            before = await _tasks(session, swapper.url)
            for number in range(10, 50):
                await _handover(session, swapper.url, number)
            after = await _tasks(session, swapper.url)
    assert sum(after.values()) <= sum(before.values()) + 2, after - before


async def _handover(session: aiohttp.ClientSession, url: str, number: int) -> None:
    await _talk(session, url)
    body = {"card": "gpu0", "label": f"number {number}"}
    async with session.post(f"{url}/api/leases?wait=30", json=body) as answer:
        lease = await answer.json()
    assert lease["state"] == "granted", lease
    async with session.delete(f"{url}/api/leases/{lease['id']}?token={lease['token']}") as answer:
        assert answer.status == 200


async def _talk(session: aiohttp.ClientSession, url: str) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def _tasks(session: aiohttp.ClientSession, url: str) -> Counter[str]:
    """Who runs once the model serves again, by what they do."""
    await _talk(session, url)
    return Counter(str(getattr(task.get_coro(), "__qualname__", task)) for task in asyncio.all_tasks())
