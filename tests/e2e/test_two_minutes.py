"""The official clients, as they come, wait two minutes of real time for a lease to end, and are answered rightly.

All that waits so long is asked at once, since it is the only file that takes as long: streams and plain answers of both
clients, one whose read times out sooner than the wait and later than a keepalive, and bare sockets that say what is on
the wire and when.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from swapper.demo.models import make_models
from tests.support.matrix import back
from tests.support.router import RealRouter
from tests.support.server import Server, serving

WAIT_S = 120.0
KEEPALIVE_S = 10.0
SLACK_S = 2.0
SAID: Any = [{"role": "user", "content": "once upon a time"}]
ASKED: dict[str, Any] = {"model": "alpha", "messages": SAID, "max_tokens": 8}
STREAMED = {**ASKED, "stream": True}
Client = Any
"""One of theirs; as it is called here it need not fit the stubs of one version."""

Heard = list[tuple[float, bytes]]
"""What came, with the seconds since it was asked for."""


async def openai_plain(client: Client) -> str:
    answer = await client.chat.completions.create(**ASKED)
    return answer.choices[0].message.content


async def openai_stream(client: Client) -> str:
    chunks = await client.chat.completions.create(**ASKED, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def anthropic_plain(client: Client) -> str:
    answer = await client.messages.create(**ASKED)
    return "".join(block.text for block in answer.content)


async def anthropic_stream(client: Client) -> str:
    async with client.messages.stream(**ASKED) as stream:
        return "".join([text async for text in stream.text_stream])


async def impatient(url: str) -> str:
    """One whose read times out after 15 s of silence; it reads a stream line by line."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=15)
    path = f"{url}/v1/chat/completions"
    async with aiohttp.ClientSession(timeout=timeout) as client, client.post(path, json=STREAMED) as answer:
        assert answer.status == 200
        lines = [line.decode().strip() async for line in answer.content]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


async def wire(server: Server, path: str, body: Mapping[str, object], **headers: str) -> Heard:
    """All that comes on a socket of its own."""
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(raw)), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**head, **headers}.items())
    began = time.monotonic()
    writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + raw)
    heard: Heard = []
    while piece := await reader.read(1 << 16):
        heard.append((time.monotonic() - began, piece))
    writer.close()
    await writer.wait_closed()
    return heard


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    models = make_models(tmp_path, ["alpha"])
    router = RealRouter(tmp_path / "router", models, defaults={"temp": "0"})
    with serving(Server(tmp_path / "swapper", router, {"alpha": "{vram: 16GiB, default: true}"})) as server:
        back(server, "llama/alpha")
        yield server


def clients(server: Server) -> tuple[Client, Client]:
    """As they come: their own timeouts and retries."""
    return (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none"),
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none"),
    )


def silences(heard: Heard) -> list[float]:
    """Seconds from the request to the first bytes, and from each to the next, as long as the card was held."""
    times = [0.0, *(at for at, _ in heard if at < WAIT_S)]
    return [after - before for before, after in pairwise(times)]


def kept_alive(heard: Heard, word: bytes) -> None:
    """Nothing before the first is due, then one that says `word` every ten seconds."""
    first, piece = heard[0]
    assert KEEPALIVE_S - 0.1 <= first <= KEEPALIVE_S + SLACK_S, heard[:3]
    assert piece.startswith(b"HTTP/1.1 200"), piece
    waiting = b"".join(piece for at, piece in heard if at < WAIT_S)
    assert WAIT_S / KEEPALIVE_S - 1 <= waiting.count(word) <= WAIT_S / KEEPALIVE_S, waiting
    assert max(silences(heard)) <= KEEPALIVE_S + SLACK_S, heard


@pytest.mark.timeout(240)
async def test_who_waits_two_minutes_for_a_lease_is_answered_as_ever(server: Server) -> None:
    first, other = clients(server)
    async with first, other:
        await waited(server, first, other)


async def waited(server: Server, first: Client, other: Client) -> None:
    text = await openai_plain(first)
    lease = await asyncio.to_thread(server.lease, "render", wait=60)
    assert lease["state"] == "granted"
    asks: dict[str, Callable[[], Any]] = {
        "openai": lambda: openai_plain(first),
        "openai, streaming": lambda: openai_stream(first),
        "anthropic": lambda: anthropic_plain(other),
        "anthropic, streaming": lambda: anthropic_stream(other),
        "15 s of silence": lambda: impatient(server.url),
    }
    async with asyncio.TaskGroup() as group:
        beats = group.create_task(_beats(server, lease))
        calls = {name: group.create_task(ask()) for name, ask in asks.items()}
        chat = group.create_task(wire(server, "/v1/chat/completions", STREAMED))
        messages = group.create_task(wire(server, "/v1/messages", STREAMED))
        plain = group.create_task(wire(server, "/v1/chat/completions", ASKED))
        refused = group.create_task(wire(server, "/v1/chat/completions", STREAMED, **{"X-Swapper-Max-Wait": "8s"}))
        late = group.create_task(wire(server, "/v1/chat/completions", STREAMED, **{"X-Swapper-Max-Wait": "25s"}))
        await asyncio.sleep(WAIT_S)  # the one wait that has to be a real one
        assert [name for name, call in calls.items() if call.done()] == []
        beats.cancel()
        await asyncio.to_thread(server.release, lease)
    assert {name: call.result() for name, call in calls.items()} == dict.fromkeys(asks, text)
    kept_alive(chat.result(), b'"delta":{}')
    kept_alive(messages.result(), b"event: ping")
    assert plain.result()[0][0] > WAIT_S, "a plain answer has no byte before it is there"
    assert plain.result()[0][1].startswith(b"HTTP/1.1 200")
    at, piece = refused.result()[0]
    assert piece.startswith(b"HTTP/1.1 503"), "until the first keepalive is due an error has its status"
    assert 8 <= at <= 8 + SLACK_S
    assert b"(render)" in piece
    assert b"Retry-After" in piece
    heard = b"".join(piece for _, piece in late.result())
    assert heard.startswith(b"HTTP/1.1 200")
    assert b"gpu_busy" in heard
    assert b"data: [DONE]" in heard


async def _beats(server: Server, lease: dict[str, object]) -> None:
    """The lease is held by one that lives."""
    while True:
        await asyncio.sleep(5)
        path = f"/api/leases/{lease['id']}/heartbeat"
        await asyncio.to_thread(server.post, path, {"token": lease["token"]})
