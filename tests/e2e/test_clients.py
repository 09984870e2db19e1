"""The official clients of OpenAI and Anthropic, unchanged, against a real llama-server behind the gateway.

What they get is what the server itself answers them, whatever they ask for; while a lease has the card they wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, cast

import anthropic
import openai
import pytest
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta

from swapper.demo.models import SHAPES, make_models
from tests.support.projector import make_projector, picture
from tests.support.router import RealRouter
from tests.support.server import Server, serving

Client = Any
"""One of theirs; as it is called here it need not fit the stubs of one version."""
Ask = Callable[[Client], Awaitable[object]]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
    }
]
CALLED: Any = [
    {"role": "user", "content": "the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
NOTHING = Choice(index=0, delta=ChoiceDelta())
HI: Any = [{"role": "user", "content": "hi"}]
SHOWN: Any = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": picture(3)}}],
    }
]
SHOWN_ANTHROPIC: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "what?"},
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": picture(3).partition(",")[2]},
            },
        ],
    }
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models: one that sees, one that embeds."""
    folder = tmp_path_factory.mktemp("clients")
    models = make_models(folder, ["alpha", "beta"])
    projector = make_projector(folder / "mmproj.gguf", SHAPES["alpha"].width)
    overrides = {
        "alpha": {"mmproj": str(projector), "no-mmproj-offload": "true"},
        "beta": {"embeddings": "true", "pooling": "mean"},
    }
    router = RealRouter(folder / "router", models, overrides=overrides)
    traits = {"alpha": "{vram: 8GiB, default: true}", "beta": "{vram: 8GiB, default: true}"}
    server = Server(folder / "swapper", router, traits)
    server.env = {"SWAPPER__GATEWAY__KEEPALIVE": "1s"}
    with serving(server):
        yield server


@contextlib.asynccontextmanager
async def of_openai(url: str) -> AsyncGenerator[Client]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="mine", max_retries=0) as client:
        yield client


@contextlib.asynccontextmanager
async def of_anthropic(url: str) -> AsyncGenerator[Client]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="mine", max_retries=0) as client:
        yield client


async def chat(client: Client, **more: object) -> object:
    asked = {"model": "alpha", "messages": HI, "max_tokens": 8, "temperature": 0, **more}
    return (await client.chat.completions.create(**asked)).choices


async def streamed(client: Client, **more: object) -> object:
    asked = {"model": "alpha", "messages": HI, "max_tokens": 8, "temperature": 0, "stream": True, **more}
    return [chunk.choices async for chunk in await client.chat.completions.create(**asked) if chunk.choices]


async def completion(client: Client) -> object:
    return (await client.completions.create(model="alpha", prompt="hi", max_tokens=8, temperature=0)).choices


async def response(client: Client) -> object:
    return (await client.responses.create(model="alpha", input="hi", max_output_tokens=8, temperature=0)).output_text


async def response_streamed(client: Client) -> object:
    events = await client.responses.create(model="alpha", input="hi", max_output_tokens=8, temperature=0, stream=True)
    return [(event.type, getattr(event, "delta", None)) async for event in events]


async def embedding(client: Client) -> object:
    return (await client.embeddings.create(model="beta", input=["one", "two"])).data


ASKED: dict[str, Ask] = {
    "chat": chat,
    "chat, streamed": streamed,
    "tools": lambda client: chat(client, messages=CALLED, tools=TOOLS),
    "tools, streamed": lambda client: streamed(client, messages=CALLED, tools=TOOLS, tool_choice="auto"),
    "a picture": lambda client: chat(client, messages=SHOWN),
    "completion": completion,
    "response": response,
    "response, streamed": response_streamed,
    "embedding": embedding,
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
async def test_openais_client_gets_what_the_server_answers(server: Server, ask: Ask) -> None:
    async with of_openai(server.url) as through, of_openai(server.router.url) as direct:
        assert await ask(through) == await ask(direct)


async def message(client: Client, messages: object = HI) -> object:
    asked = {"model": "alpha", "messages": messages, "max_tokens": 8}
    return (await client.messages.create(**asked, extra_body={"temperature": 0})).content


async def message_streamed(client: Client) -> object:
    greedy = {"temperature": 0}
    async with client.messages.stream(model="alpha", messages=HI, max_tokens=8, extra_body=greedy) as events:
        types = [event.type async for event in events]
        return types, (await events.get_final_message()).content


async def counted(client: Client) -> object:
    return await client.messages.count_tokens(model="alpha", messages=HI)


MESSAGES: dict[str, Ask] = {
    "message": message,
    "message, streamed": message_streamed,
    "a picture": lambda client: message(client, SHOWN_ANTHROPIC),
    "tokens": counted,
}


@pytest.mark.parametrize("ask", MESSAGES.values(), ids=MESSAGES)
async def test_anthropics_client_gets_what_the_server_answers(server: Server, ask: Ask) -> None:
    async with of_anthropic(server.url) as through, of_anthropic(server.router.url) as direct:
        assert await ask(through) == await ask(direct)


async def test_a_refusal_is_the_clients_own_error(server: Server) -> None:
    async with of_openai(server.url) as client:
        with pytest.raises(openai.NotFoundError, match="did you mean alpha"):
            await chat(client, model="alfa")
    async with of_anthropic(server.url) as client:
        with pytest.raises(anthropic.NotFoundError, match="beta"):
            await client.messages.count_tokens(model="betta", messages=HI)


async def test_while_a_lease_has_the_card_every_client_waits_and_is_answered(server: Server) -> None:
    """With their own timeouts and no error; streams hear something every second."""
    lease = await asyncio.to_thread(server.lease, "render", wait=60)
    assert lease["state"] == "granted"
    async with of_openai(server.url) as one, of_anthropic(server.url) as other:
        calls: list[asyncio.Task[object]] = []
        async with asyncio.TaskGroup() as tasks:
            calls += [tasks.create_task(_done(ask(one))) for ask in ASKED.values()]
            calls += [tasks.create_task(_done(ask(other))) for ask in MESSAGES.values()]
            done, _ = await asyncio.wait(calls, timeout=3.5)
            assert not done, "each waits for the card"
            await asyncio.to_thread(server.release, lease)
        answers = [call.result() for call in calls]
        heard = cast("list[list[Choice]]", answers[1])
        assert [choices for choices in heard if choices[0] != NOTHING] == await streamed(one)
        assert len([choices for choices in heard if choices[0] == NOTHING]) >= 3, "told every second that it waits"
        assert all(answers)


async def _done(answer: Awaitable[object]) -> object:
    return await answer
