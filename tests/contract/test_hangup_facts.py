"""What llama-server does when a client leaves before its answer has begun: the child stops, the router does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from swapper.demo.models import make_models
from swapper.gateway.child import Children
from swapper.gateway.context import Target
from tests.contract.conftest import ONE_THREAD
from tests.contract.talk import Json, Talk
from tests.support.router import RealRouter
from workers.llama.router import LlamaRouter

MED = "llama/med"
LONG = 3500
"""Tokens: many seconds of med."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRouter]:
    folder = tmp_path_factory.mktemp("slow")
    router = RealRouter(
        folder,
        make_models(folder / "models", ["med"]),
        parallel=1,
        ctx=4096,
        defaults={**ONE_THREAD, "batch-size": "256"},
    )
    try:
        yield router.start()
    finally:
        router.stop()


@pytest.fixture
async def talk(slow: RealRouter) -> AsyncIterator[Talk]:
    async with Talk(slow.url) as talk:
        await talk.load("med")
        yield talk


@pytest.fixture
async def backend(slow: RealRouter, tmp_path: Path) -> AsyncIterator[LlamaRouter]:
    backend = LlamaRouter(slow.url, tenants={MED: "med"}, state_dir=tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def child(talk: Talk) -> str:
    url = await Children(talk.session).locate(Target(MED, talk.url, "med"), 1)
    assert url is not None
    return url


async def leave(talk: Talk, url: str, body: Json) -> None:
    """Send a call and close its connection once it is being worked on."""
    raw = json.dumps({"model": "med", "temperature": 0, **body}).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    _, _, port = url.rpartition(":")
    _, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(head.encode() + raw)
    while not any(slot["is_processing"] for slot in (await talk.get("/slots", model="med"))[1]):
        pass
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_child_stops_writing_once_its_client_left(
    talk: Talk, child: str, backend: LlamaRouter, stream: bool
) -> None:
    await leave(talk, child, {"prompt": "hello", "n_predict": LONG, "stream": stream})
    (use,) = (await backend.quiesce(MED)).slots
    assert use.tokens < LONG


async def test_a_child_stops_reading_once_its_client_left(talk: Talk, child: str, backend: LlamaRouter) -> None:
    prompt = "abcdefg " * 450
    await leave(talk, child, {"prompt": prompt, "n_predict": 8})
    (use,) = (await backend.quiesce(MED)).slots
    assert use.tokens < len(prompt)


async def test_a_router_writes_a_plain_answer_to_its_end_although_its_client_left(
    talk: Talk, slow: RealRouter, backend: LlamaRouter
) -> None:
    await leave(talk, slow.url, {"prompt": "hello", "n_predict": 600})
    (use,) = (await backend.quiesce(MED)).slots
    assert use.tokens >= 600


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_child_answers_as_its_router_does(talk: Talk, child: str, path: str, stream: bool) -> None:
    ask: Json = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body: Json = {"model": "med", "max_tokens": 5, "temperature": 0, "cache_prompt": False, "stream": stream, **ask}
    answers: list[tuple[int, str, list[str]]] = []
    for url in (talk.url, child):
        async with talk.session.post(url + path, json=body) as answer:
            answers.append((answer.status, answer.content_type, _meaning(await answer.text(), stream=stream)))
    assert answers[0] == answers[1]


async def test_nobody_is_taken_for_a_child_that_is_not(talk: Talk) -> None:
    async with aiohttp.ClientSession() as session:
        children = Children(session)
        assert await children.locate(Target(MED, talk.url, "nobody"), 1) is None
        await talk.unload("med")
        assert await children.locate(Target(MED, talk.url, "med"), 1) is None


def _meaning(text: str, *, stream: bool) -> list[str]:
    """All of an answer but its id and its times."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
    found: list[str] = []
    for line in lines:
        value: Json = json.loads(line)
        for name in ("id", "created", "timings", "id_slot"):
            value.pop(name, None)
        found.append(json.dumps(value))
    return found
