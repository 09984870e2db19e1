"""What llama-server does when a client leaves before its answer has begun: the child stops, the router does not."""

from __future__ import annotations

import asyncio
import contextlib
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
LOOKS, PAUSE_S = 300, 0.05
"""How often it is looked whether a call is at work: each look is a task of the server's beside it."""


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
    child = await Children(talk.session).locate(Target(MED, talk.url, "med"), 1)
    assert child is not None
    return child.url


async def leave(talk: Talk, url: str, body: Json) -> None:
    """Send a call and close its connection once it is being worked on."""
    raw = json.dumps({"model": "med", "temperature": 0, **body}).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(head.encode() + raw)
    answered = asyncio.create_task(reader.read(1))
    for _ in range(LOOKS):
        await asyncio.wait({answered}, timeout=PAUSE_S)
        if answered.done() and body.get("stream"):
            break
        if any(slot["is_processing"] for slot in (await talk.get("/slots", model="med"))[1]):
            break
        assert not answered.done(), "it was answered before it was seen at work"
    else:
        pytest.fail("it was never seen at work")
    answered.cancel()
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
    speed = (await talk.say("med", "hello", n=16))["timings"]["predicted_per_second"]
    length = min(int(1.2 * speed), LONG)  # a child looks for its client once a second
    await leave(talk, slow.url, {"prompt": "hello", "n_predict": length})
    (use,) = (await backend.quiesce(MED)).slots
    assert use.tokens >= length


async def test_a_router_with_a_models_limit_unloads_a_model_at_work_that_was_called_directly(tmp_path: Path) -> None:
    """So that nobody is called directly there. The children of a router with a key need none."""
    models = make_models(tmp_path / "models", ["alpha", "med"])
    hasty = {"med": {"stop-timeout": "1"}}
    limited = ["--models-max", "1", "--api-key", "secret"]
    router = RealRouter(tmp_path / "router", models, ctx=4096, defaults=ONE_THREAD, overrides=hasty, arguments=limited)
    try:
        async with Talk(router.start().url) as talk, aiohttp.ClientSession() as keyless:
            talk.session.headers["Authorization"] = "Bearer secret"
            await talk.load("med")
            target = Target(MED, talk.url, "med", api_key="secret")
            assert await Children(talk.session).locate(target, 1) is None
            args = (await talk.model("med"))["status"]["args"]
            url = f"http://127.0.0.1:{args[args.index('--port') + 1]}/completion"
            async with keyless.post(url, json={"prompt": "hello", "n_predict": LONG, "stream": True}) as answer:
                assert answer.status == 200
                await answer.content.readline()
                await talk.load("alpha")
                assert await talk.status("med") == "unloaded"
                with contextlib.suppress(aiohttp.ClientError):
                    assert b'"stop":true' not in await answer.read()
    finally:
        router.stop()


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
