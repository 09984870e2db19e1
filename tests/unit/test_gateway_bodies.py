"""Bodies and headers that no call can be made of: each is refused in the envelope, and brings no model onto a card."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from swapper.gateway.context import Budget, Limits
from swapper.gateway.errors import load_failed
from swapper.gateway.parse import CHECKED_BYTES, MEMBERS
from tests.unit.gateway_doubles import Script, Served, serve

PLAIN = b'{"model": "alpha"}'


def bare(body: bytes, level: int = -1) -> bytes:
    """Deflate without a zlib header."""
    deflate = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    return deflate.compress(body) + deflate.flush()


class Told(Budget):
    """A budget that tells when a first piece of a body has come."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.taken = asyncio.Event()

    def take(self, size: int) -> bool:
        self.taken.set()
        return super().take(size)


@asynccontextmanager
async def raw(gateway: Served) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection to the gateway."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        (b"{", 400, "bad_request", "not JSON"),
        (b"\xff", 400, "bad_request", "not JSON"),
        (
            b'{"model": "alpha", "prompt": "\xff"}',
            400,
            "bad_request",
            "invalid start byte (byte 30), and JSON is UTF-8",
        ),
        (b'{"model": "gpt-4o", "\xff": 1}', 400, "bad_request", "JSON is UTF-8"),
        (b'{"model": "alpha", "temperature": NaN}', 400, "bad_request", "not JSON"),
        (b'{"model": "alpha", "prompt": "\\ud800"}', 400, "bad_request", "a lone surrogate"),
        (b'{"model": "alpha", "prompt": "\\ud83d\\ude0', 400, "bad_request", "truncated"),
        (b"[]", 400, "bad_request", "wrong field"),
        (b'{"model": 3}', 400, "bad_request", "wrong field"),
        (b'{"model": "alpha", "stream": "yes"}', 400, "bad_request", "wrong field"),
        (b'{"messages": [{"content": "\\"model\\": \\"alpha\\""}]}', 400, "model_missing", "names no model"),
        (b'{"model": "alpa"}', 404, "model_not_found", "did you mean alpha?"),
        (b'{"model": "zzzzzz"}', 404, "model_not_found", "/v1/models"),
    ],
)
async def test_a_body_that_cannot_be_served_is_refused_in_words(
    body: bytes, status: int, code: str, words: str
) -> None:
    async with serve() as gateway, gateway.client.post(gateway.url + "/v1/chat/completions", data=body) as response:
        assert response.status == status
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == code
        assert words in error["message"]
        assert gateway.upstream.seen == []
        assert gateway.ctx.budget.used == 0


async def test_a_large_body_that_is_no_text_brings_no_model_onto_its_card() -> None:
    body = b'{"model": "alpha", "padding": "' + b" " * CHECKED_BYTES + b'\xff"}'
    async with serve(opened=False) as gateway:
        async with gateway.client.post(gateway.url + "/completion", data=body) as response:
            assert (response.status, "JSON is UTF-8" in await response.text()) == (400, True)
        assert gateway.admission.waiting == 0


@pytest.mark.parametrize(
    ("body", "model"),
    [(b'{"model": "zzz", "model": "gpt-4o"}', "alpha"), (b'{"model": "gpt-4o", "model": "alpha"}', "alpha")],
)
async def test_of_two_models_in_a_body_the_last_counts_here_and_at_the_server(body: bytes, model: str) -> None:
    async with serve() as gateway, gateway.client.post(gateway.url + "/completion", data=body) as response:
        assert response.status == 200
        assert json.loads(gateway.upstream.seen[0].body)["model"] == model


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(PLAIN, mtime=0), 200),
        ("GZIP", gzip.compress(PLAIN, mtime=0), 200),
        ("deflate", zlib.compress(PLAIN), 200),
        ("deflate", bare(PLAIN), 200),
        ("deflate", bare(PLAIN, level=0), 200),
        (
            "gzip",
            gzip.compress(PLAIN[:7], mtime=0) + gzip.compress(b"", mtime=0) + gzip.compress(PLAIN[7:], mtime=0),
            200,
        ),
        ("identity", PLAIN, 200),
        ("gzip", b"garbage", 400),
        ("gzip", PLAIN, 400),
        ("gzip", gzip.compress(PLAIN, mtime=0)[:-1], 400),
        ("gzip", gzip.compress(PLAIN, mtime=0) + b"more", 400),
        ("gzip", gzip.compress(PLAIN, mtime=0) + gzip.compress(b"", mtime=0)[:-1], 400),
        ("gzip", gzip.compress(b"", mtime=0) * MEMBERS + gzip.compress(PLAIN, mtime=0), 400),
        ("gzip", bare(PLAIN), 400),
        ("deflate", zlib.compress(PLAIN) + zlib.compress(PLAIN), 400),
        ("deflate", bare(PLAIN) + bare(PLAIN), 400),
        ("deflate", zlib.compress(PLAIN) + gzip.compress(b"", mtime=0), 400),
        ("deflate", bare(PLAIN)[:-1], 400),
        ("gzip", b"", 400),
        ("deflate", b"garbage", 400),
        ("gzip", gzip.compress(b" " * 5_000_000 + PLAIN, mtime=0), 413),
        ("gzip", gzip.compress(b" " * 1_500_000, mtime=0) * 2, 413),
        ("deflate", bare(b" " * 5_000_000 + PLAIN), 413),
        ("br", PLAIN, 415),
        ("zstd", PLAIN, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(PLAIN, mtime=0), mtime=0), 415),
        ("sn\xf6d", PLAIN, 415),
    ],
)
async def test_a_compressed_body_is_undone_or_refused_in_words(encoding: str, body: bytes, status: int) -> None:
    async with (
        serve(limits=Limits(body_limit=2_000_000)) as gateway,
        gateway.client.post(
            gateway.url + "/v1/chat/completions",
            data=body,
            headers={"Content-Encoding": encoding},
            skip_auto_headers=("Content-Type",),
        ) as response,
    ):
        assert response.status == status
        if status == 200:
            seen = gateway.upstream.seen[0]
            assert (seen.body, seen.headers.get("Content-Encoding")) == (PLAIN, None)
        else:
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert gateway.ctx.budget.used == 0


async def test_a_compressed_body_that_gives_nothing_is_bounded_by_what_came() -> None:
    async def blocks() -> AsyncGenerator[bytes]:
        yield zlib.compress(b"")[:2]
        for _ in range(100):
            yield b"\0\0\0\xff\xff" * 1000  # deflate's empty block

    async with (
        serve(limits=Limits(body_limit=100_000)) as gateway,
        gateway.client.post(
            gateway.url + "/completion", data=blocks(), headers={"Content-Encoding": "deflate"}
        ) as response,
    ):
        assert response.status == 413


async def test_a_body_that_stops_coming_is_408_and_gives_its_budget_back() -> None:
    head = b"POST /completion HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serve(limits=Limits(body_pause_ms=100)) as gateway:
        gateway.ctx.budget = budget = Told(1000)
        async with raw(gateway) as (reader, writer):
            writer.write(head + b"2\r\n{ \r\n")
            await budget.taken.wait()
            writer.write(b"zz\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            await reader.readuntil(b"no more of the body came for 0.1 s")
            assert budget.used == 0


async def test_a_body_that_cannot_be_read_is_refused_in_words() -> None:
    @web.middleware
    async def broken(request: web.Request, handler: Script) -> web.StreamResponse:
        request.content.set_exception(web.RequestPayloadError("of the parser"))
        return await handler(request)

    async with serve(middleware=broken) as gateway:
        got = await gateway.call({"model": "alpha"})
        assert got.status == 400
        assert "not chunked as it says" in got.error()["message"]


@pytest.mark.parametrize("value", [b"\xff\xfe", b"\xed\xa0\x80", b"a" * 5000])
async def test_a_class_that_is_no_text_is_refused_in_words(value: bytes) -> None:
    head = b"POST /completion HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\nX-Swapper-Class: "
    async with serve() as gateway, raw(gateway) as (reader, writer):
        writer.write(head + value + b"\r\n\r\n{}")
        answer, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert "is not one of interactive" in json.loads(body)["error"]["message"]
    assert len(body) < 300


def test_no_words_break_an_envelope() -> None:
    envelope = json.loads(load_failed("alpha", "the log says \udcff").envelope())
    assert envelope["error"]["message"].endswith("the log says ?")


async def test_a_body_nested_too_deeply_is_a_clean_400() -> None:
    deep = '{"model": "alpha", "messages": ' + "[" * 50_000 + "]" * 50_000 + "}"
    async with serve() as gateway, gateway.client.post(gateway.url + "/v1/chat/completions", data=deep) as response:
        assert response.status == 400
        assert "error" in await response.json()
