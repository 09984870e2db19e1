"""Who does not read is waited for and holds up nobody else: what lies in between is bounded, on both sides."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from tests.support.liar import CHUNKED, LAST, SSE, Heard, Line, answer, chunk, ok, says
from tests.support.wire import HUNG_S, PIECE, request, settled, wire
from tests.unit.gateway_doubles import ALPHA
from tests.unit.gateway_liar import BOTH, PLAIN_CALL, STREAMED_CALL, lied_to

both = pytest.mark.parametrize("kind", BOTH)
MIB = 1 << 20
LARGE = request(b'{"model": "alpha", "padding": "%s"}' % (b"x" * 60 * MIB), "/completion")
FLOOD = 64 * MIB
BETWEEN = 28 * MIB
"""More than the sockets in between can hold."""


@contextmanager
def measured() -> Generator[None]:
    """Memory that Python objects take is counted from here on."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def held() -> float:
    """MiB that are held now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / MIB


# ---- a server that does not read


@both
async def test_a_large_body_for_a_server_that_reads_nothing_is_held_once_and_let_go(kind: str) -> None:
    """Twice where the loop copies what it could not write."""

    async def never_reads(line: Line, heard: Heard) -> None:
        await silence.wait()

    silence = asyncio.Event()
    async with lied_to(kind) as lied:
        lied.liar.reads_bodies = False
        lied.liar.plays = [never_reads]
        with measured():
            async with wire(lied.gateway.url) as client:
                await client.send(LARGE)
                async with asyncio.timeout(HUNG_S):
                    await lied.liar.arrived.get()
                await settled(lambda: client.sent)
                assert 60 <= held() < 125
                assert tracemalloc.get_traced_memory()[1] < 190 * MIB
                client.leave()
                await lied.gateway.admission.drained(ALPHA)
            await settled(lambda: None)
            assert held() < 5
        silence.set()
        assert lied.gateway.ctx.budget.used == 0


@both
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("status", [200, 413, 500])
async def test_an_answer_that_comes_before_the_whole_body_was_read_counts(kind: str, closes: bool, status: int) -> None:
    """Where its server then hangs up on what it did not read, the network may lose it."""

    async def early(line: Line, heard: Heard) -> None:
        await line.write(answer(status, b'{"early": true}'))
        if closes:
            line.die()
        else:
            await line.hung_up()

    async with lied_to(kind) as lied:
        lied.liar.reads_bodies = False
        lied.liar.plays = [early]
        got = await lied.call(LARGE)
        if not closes or got.status != 502:
            assert (got.status, got.body, got.complete) == (status, b'{"early": true}', True)
        lied.liar.reads_bodies = True
        lied.liar.plays = [says(ok(b'{"second": 1}'))]
        assert (await lied.call()).body == b'{"second": 1}'
        await lied.at_rest()


@both
async def test_a_body_reaches_a_slow_server_whole(kind: str) -> None:
    async def reads_on(line: Line, heard: Heard) -> None:
        size = int(heard.all("Content-Length")[0])
        got = await line.reader.readexactly(size)
        await line.write(ok(b"%d" % (got == LARGE[-size:])))

    async with lied_to(kind) as lied:
        lied.liar.reads_bodies = False
        lied.liar.plays = [reads_on]
        got = await lied.call(LARGE)
        assert (got.status, got.body) == (200, b"1")
        await lied.at_rest()


# ---- a client that does not read


def plain(data: bytes) -> bytes:
    return data


FLOODS = {
    "a length": (answer(200, b"")[:-5] + b"%d\r\n\r\n" % FLOOD, plain, b"", b"x" * PIECE),
    "chunks": (CHUNKED, chunk, LAST, b"x" * PIECE),
    "events": (SSE, chunk, LAST, b"data: %s\n\n" % (b"x" * (PIECE - 8))),
    "small events": (SSE, chunk, LAST, b"data: 12345678\n\n" * (PIECE // 16)),
}


@both
@pytest.mark.parametrize("how", FLOODS)
async def test_a_client_that_reads_nothing_holds_its_server_back_and_nobody_else(kind: str, how: str) -> None:
    head, framed, end, piece = FLOODS[how]
    framed_piece = framed(piece)

    async def flood(line: Line, heard: Heard) -> None:
        await line.write(head)
        for _ in range(FLOOD // PIECE):
            await line.write(framed_piece)
        await line.write(end)

    async with lied_to(kind) as lied:
        assert (await lied.call()).status == 200  # a child is looked for
        lied.liar.plays = [flood, says(ok(b'{"second": 1}'))]
        with measured():
            async with wire(lied.gateway.url) as client:
                await client.send(STREAMED_CALL if head is SSE else PLAIN_CALL)
                await lied.liar.arrived.get()
                await settled(lambda: lied.liar.wrote)
                assert lied.liar.wrote < BETWEEN
                assert held() < 5
                assert (await lied.call()).body == b'{"second": 1}'
                got = await client.answer()
                assert (got.status, len(got.body), got.complete) == (200, FLOOD, True)
        assert lied.liar.wrote >= FLOOD
        await lied.at_rest()


@both
@pytest.mark.parametrize("how", FLOODS)
@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_read_nothing_and_leaves_lets_its_server_go(kind: str, how: str, reset: bool) -> None:
    head, framed, _, piece = FLOODS[how]
    framed_piece = framed(piece)

    async def for_ever(line: Line, heard: Heard) -> None:
        await line.write(head)
        while True:
            await line.write(framed_piece)

    async with lied_to(kind) as lied:
        lied.liar.plays = [for_ever]
        async with wire(lied.gateway.url) as client:
            await client.send(STREAMED_CALL if head is SSE else PLAIN_CALL)
            await lied.liar.arrived.get()
            await settled(lambda: lied.liar.wrote)
            client.leave(reset=reset)
            async with asyncio.timeout(HUNG_S):
                await lied.liar.lines[-1].gone.wait()
        await lied.at_rest()
