"""Clients hammer the lease API while serve and its store are killed and stopped; what they saw must fit together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import aiohttp
import psutil
import pytest

from swapper.demo.models import make_models
from swapper.store import embedded
from tests.support import hammer
from tests.support.fake_server import FakeServer
from tests.support.hammer import Book, Client
from tests.support.history import judge
from tests.support.matrix import eventually
from tests.support.router import RealRouter
from tests.support.server import ALPHA, Json, Server, serving

CLIENTS = 8
BETWEEN = 12
"""So many leases are granted between one accident and the next."""
LIMIT_S = 160
"""Six times what it takes: after a gap in the service of a starved machine a forgotten lease lives on for 30 s."""
ACCIDENTS = ("kill serve", "stop serve", "kill store", "stop store", "kill both", "kill store", "kill serve")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    router = FakeServer(tmp_path / "router", make_models(tmp_path, ["alpha"]))
    server = Server(tmp_path / "swapper", cast("RealRouter", router), ALPHA)
    with server.config.open("a") as config:
        config.write("policy: {grace: 0.2s}\n")
    with serving(server):
        yield server


@pytest.mark.timeout(LIMIT_S + 60)
async def test_what_clients_saw_through_kills_and_stops_fits_together(server: Server) -> None:
    book = Book()
    async with hammer.session() as session:
        try:
            async with asyncio.timeout(LIMIT_S):
                await _hammered(session, server, book)
            await asyncio.to_thread(server.until, _rests)
        except TimeoutError:
            print(f"not done in {LIMIT_S} s; what was seen until then is judged")
        leases, stored = await hammer.stored(session, server.url)
        events = await hammer.events(session, server.url)
    print(f"{len(leases)} leases, {len(book.granted)} granted; {len(book.calls)} calls, {book.unknown} unanswered")
    assert judge(book.calls, leases, events, stored) == []
    assert len(book.granted) > len(ACCIDENTS) * BETWEEN
    assert book.unknown >= len(ACCIDENTS)


async def _hammered(session: aiohttp.ClientSession, server: Server, book: Book) -> None:
    """Clients at work through every accident, until each has let go of its last lease."""
    up = asyncio.Event()
    up.set()
    async with asyncio.TaskGroup() as group:
        calling = group.create_task(_call_by_name(session, server.url, up))
        clients = [Client(number, server.url, book, up, seed=1) for number in range(CLIENTS)]
        running = [group.create_task(client.run(session)) for client in clients]
        for accident in ACCIDENTS:
            await book.until(grants=BETWEEN)
            await _happens(accident, server, book, up)
        clients[0].careless = True
        await book.until(grants=BETWEEN)
        for client in clients:
            client.done.set()
        await asyncio.wait(running)
        calling.cancel()


def _rests(status: Json) -> list[Json]:
    """The card, once nobody waits or holds and its resident serves."""
    (card,) = cast("list[Json]", status["cards"])
    rests = not status["leases"] and card["phase"] == "steady" and card["residents"] == ["llama/alpha"]
    return [card] if rests else []


async def _happens(accident: str, server: Server, book: Book, up: asyncio.Event) -> None:
    store = embedded.running(server.state_dir)
    assert store is not None
    what, _, whom = accident.partition(" ")
    if what == "stop":
        pid = server.pid if whom == "serve" else store.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await book.until(unknown=2)
        finally:
            os.kill(pid, signal.SIGCONT)
        return
    up.clear()
    if whom != "serve":
        psutil.Process(store.pid).kill()
    if whom != "store":
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    await asyncio.to_thread(eventually, lambda: server.get("/api/leases?limit=1"), "its store is there again")
    up.set()


async def _call_by_name(session: aiohttp.ClientSession, url: str, up: asyncio.Event) -> None:
    """Somebody talks to the model, so that it comes back between leases and its conversation is kept."""
    body = {"model": "alpha", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    while True:
        await up.wait()
        with suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()
