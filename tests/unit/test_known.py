"""What a call holds of its body while its answer passes, what that counts for, and how it knows its conversation."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace

import pytest
from aiohttp import web

from swapper.gateway import http, wire
from swapper.gateway.calls import Asked, in_body
from swapper.gateway.context import Budget, GatewayContext, Held, Limits
from swapper.gateway.known import Known
from swapper.gateway.routes import Way
from swapper.problem import Problem
from swapper.snapshots.chain import BLOCK_BYTES
from swapper.snapshots.conversation import Kept, Relation, Request
from swapper.snapshots.index import Index
from tests.unit.gateway_doubles import Served, Stream, event, serve
from tests.unit.gateway_link import ALPHA
from tests.unit.index_doubles import CHAT, TENANT, answer, chat, text

LONG = "x" * 200_000
BODIES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "text": ("/completion", {"prompt": LONG}),
    "tokens": ("/completion", {"prompt": list(range(50_000))}),
}


class Bodies:
    """`there`: how many bodies that the gateway has read somebody holds, views of them among that."""

    def __init__(self) -> None:
        self._there = 0

    @property
    def there(self) -> int:
        gc.collect()
        return self._there

    def watch(self, body: bytes) -> bytes:
        bodies = self

        class Body(bytes):
            def __del__(self) -> None:
                bodies._there -= 1

        self._there += 1
        return Body(body)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Bodies:
    bodies, read = Bodies(), http._read_body  # pyright: ignore[reportPrivateUsage]

    async def watched(ctx: GatewayContext, request: web.Request, held: Held) -> Problem | None:
        problem = await read(ctx, request, held)
        held.body = bodies.watch(held.body)
        return problem

    async def watched_too(ctx: GatewayContext, kind: str, held: Held, way: Way) -> Asked | Problem:
        held.body = bodies.watch(held.body)
        return await in_body(ctx, kind, held, way)

    monkeypatch.setattr(http, "_read_body", watched)
    monkeypatch.setattr(wire, "in_body", watched_too)
    return bodies


async def begun(gateway: Served, kind: str, model: str) -> tuple[asyncio.Task[bytes], Stream]:
    """A call whose answer has begun."""
    path, body = BODIES[kind]
    stream = Stream().put(event('{"choices":[]}'))
    gateway.upstream.scripts = [stream]
    first = asyncio.Event()

    async def call() -> bytes:
        async with gateway.post({**body, "model": model, "stream": True}, path) as response:
            assert response.status == 200
            await response.content.readany()
            first.set()
            return await response.read()

    task = asyncio.create_task(call())
    await first.wait()
    return task, stream


@pytest.mark.parametrize("model", ["alpha", "gpt-4o"])
@pytest.mark.parametrize("kind", BODIES)
async def test_where_no_body_is_kept_it_is_gone_once_the_answer_begins(bodies: Bodies, kind: str, model: str) -> None:
    async with serve(private=frozenset({ALPHA})) as gateway:
        call, stream = await begun(gateway, kind, model)
        assert (bodies.there, gateway.ctx.budget.used) == (0, 0)
        stream.put(event("[DONE]"), None)
        await call


@pytest.mark.parametrize("kind", BODIES)
async def test_a_body_that_is_kept_counts_until_the_index_has_it(bodies: Bodies, kind: str) -> None:
    async with serve() as gateway:
        call, stream = await begun(gateway, kind, "alpha")
        size, index = len(gateway.upstream.seen[0].body), gateway.member.talks.index
        assert (bodies.there, gateway.ctx.budget.used, index.bytes) == (1, size, 0)
        stream.put(event("[DONE]"), None)
        await call
        await gateway.admission.drained(ALPHA)
        assert (gateway.ctx.budget.used, index.bytes) == (0, size)


async def test_beyond_half_of_the_budget_a_passing_answer_keeps_no_body_from_those_that_wait(
    bodies: Bodies,
) -> None:
    async with serve(limits=Limits(body_budget=300_000)) as gateway:
        call, stream = await begun(gateway, "chat", "alpha")
        assert (bodies.there, gateway.ctx.budget.used) == (0, 0)
        stream.put(event("[DONE]"), None)
        await call
        await gateway.admission.drained(ALPHA)
        assert [talk.recallable for talk in gateway.member.talks.index.talks(ALPHA)] == [False]


async def test_a_body_sent_under_another_name_can_be_sent_again(bodies: Bodies) -> None:
    async with serve() as gateway:
        longer = replace(gateway.ctx.targets[ALPHA], model="alpha-by-a-much-longer-name")
        gateway.ctx.targets = {ALPHA: longer}
        call, stream = await begun(gateway, "chat", "gpt-4o")
        assert bodies.there == 0  # what is kept is what was sent
        stream.put(event("[DONE]"), None)
        await call
        await gateway.admission.drained(ALPHA)
        (talk,) = gateway.member.talks.index.talks(ALPHA)
        request = gateway.member.talks.index.request(ALPHA, talk.id)
        assert request is not None
        assert json.loads(request.body)["model"] == longer.model


def test_a_copy_of_a_text_counts_as_long_as_it_is_there() -> None:
    budget = Budget(100)
    held = Held(budget)
    assert held.add(20)
    assert held.add(15)
    assert held.sent(wanted=20)
    assert budget.used == 20
    held.release()
    assert budget.used == 0


def test_what_a_call_goes_on_with_is_looked_for_once_until_conversations_come_or_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, looked, find = Index(), list[str](), Index.find

    def counted(this: Index, tenant: str, chain: object) -> object:
        looked.append(tenant)
        return find(this, tenant, chain)  # pyright: ignore[reportArgumentType]

    answer(index, "abc")
    monkeypatch.setattr(Index, "find", counted)
    known = Known(TENANT, chat("abcd"), None)
    assert known.match(index).relation is Relation.EXTENDS
    index.stored(TENANT, Kept("one.kv", chat("abc").id, (), 0))
    match = known.match(index)
    assert (match.conversation, len(looked)) == (index.conversation(TENANT, chat("abc").id), 1)
    index.answered(TENANT, chat("abcd"), None, 3_000, 1_000, 1, None, 1, match)
    assert len(looked) == 1
    assert known.match(index).relation is Relation.SAME
    assert len(looked) == 2


def test_what_a_texts_bytes_have_shown_is_known_without_them_until_something_closer_comes() -> None:
    index, begin = Index(), "s" * BLOCK_BYTES
    index.answered(TENANT, text(begin + "one"), None, 0, 100, 1, None, 0)
    known = Known(TENANT, text(begin + "one and on"), Request(CHAT, b"{}"))
    assert known.match(index).relation is Relation.EXTENDS
    known.sent(keep=False)
    index.answered(TENANT, text(begin + "two"), None, 0, 100, 1, None, 1)
    match = known.match(index)
    assert match.conversation == index.conversation(TENANT, text(begin + "one").id)
    assert (match.relation, known.request) == (Relation.EXTENDS, None)
    index.answered(TENANT, text(begin + "one and on"), None, 0, 100, 1, None, 2)
    assert known.match(index).relation is Relation.SAME


def test_what_a_manifest_tells_while_a_call_waits_is_found_by_it() -> None:
    index, older, newer = Index(), text("one"), text("one and on")
    known = Known(TENANT, newer, None)
    assert known.match(index).relation is Relation.NEW
    index.kept(TENANT, [Kept("one.kv", older.id, (older.id,), 100)])
    assert known.match(index).relation is Relation.EXTENDS
