"""Bodies that cost the processor: whoever sends many of them holds up nobody else."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from swapper.gateway import calls, http
from swapper.gateway.context import INFLATED_AT_ONCE, GatewayContext, Held
from swapper.gateway.parse import Ask, Decoding, parse_body
from swapper.problem import Problem
from tests.unit.gateway_doubles import CHAT, Answer, Served, serve

HUNG_S = 20.0
BODIES = 3 * INFLATED_AT_ONCE
PLAIN = b'{"model": "alpha"}'


class Slow:
    """Inflating that takes until the test says so, and counts who is at it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = asyncio.Semaphore(0)
        self.most = 0
        self._now = 0
        self._guard = threading.Lock()
        loop, feed = asyncio.get_running_loop(), Decoding.feed

        def slowly(this: Decoding, chunk: bytes) -> Iterator[bytes]:
            if this.plain:
                yield from feed(this, chunk)
                return
            with self._guard:
                self._now += 1
                self.most = max(self.most, self._now)
            loop.call_soon_threadsafe(self.begun.release)
            try:
                assert self.go.wait(HUNG_S), "nobody was served meanwhile"
            finally:
                with self._guard:
                    self._now -= 1
            yield from feed(this, chunk)

        monkeypatch.setattr(Decoding, "feed", slowly)


async def _compressed(gateway: Served) -> int:
    headers = {"Content-Encoding": "gzip"}
    async with gateway.client.post(gateway.url + "/completion", data=gzip.compress(PLAIN), headers=headers) as answer:
        return answer.status


async def test_while_bodies_are_inflated_everybody_else_is_served_and_few_are_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch)
    async with serve() as gateway, asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(_compressed(gateway)) for _ in range(BODIES)]
        try:
            for _ in range(INFLATED_AT_ONCE):
                await slow.begun.acquire()
            async with asyncio.timeout(HUNG_S):
                answer = await gateway.call(CHAT)
        finally:
            slow.go.set()
        assert answer.status == 200
        assert [await call for call in calls] == [200] * BODIES
    assert slow.most == INFLATED_AT_ONCE


async def test_a_client_that_leaves_while_its_body_is_inflated_gives_its_turn_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch)
    async with serve() as gateway:
        leaving = [asyncio.create_task(_compressed(gateway)) for _ in range(INFLATED_AT_ONCE)]
        for _ in leaving:
            await slow.begun.acquire()
        slow.go.set()
        for call in leaving:
            call.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert await _compressed(gateway) == 200
        assert gateway.ctx.budget.used == 0


async def test_of_large_bodies_that_are_there_at_once_each_is_parsed_in_a_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_there, passes, seen = asyncio.Barrier(BODIES), 0, list[int]()

    async def read(_ctx: GatewayContext, _request: web.Request, held: Held) -> None:
        held.body = PLAIN
        await all_there.wait()

    def parsed(body: bytes) -> Ask | Problem:
        seen.append(passes)
        return parse_body(body)

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(calls, "LARGE_BYTES", len(PLAIN) - 1)
    monkeypatch.setattr(http, "_read_body", read)
    monkeypatch.setattr(calls, "parse_body", parsed)
    async with serve() as gateway:
        counting = asyncio.create_task(count())
        answers: list[Answer] = await asyncio.gather(*(gateway.call(CHAT) for _ in range(BODIES)))
        counting.cancel()
    assert [answer.status for answer in answers] == [200] * BODIES
    assert len(set(seen)) == BODIES
