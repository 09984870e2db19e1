"""Calls to a server that is no llama-server: nothing of a router or of slots is taken for granted of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.unit.gateway_doubles import ALPHA, CHAT, Served, answer, serve

ANSWER = {"model": "alpha", "choices": [{"message": {"role": "assistant", "content": "Hello to you, too."}}]}
TIMED = ANSWER | {"timings": {"cache_n": 1, "prompt_n": 20, "predicted_n": 3}}


@asynccontextmanager
async def other(*, slots: bool = False) -> AsyncGenerator[Served]:
    async with serve() as gateway:
        target = replace(gateway.ctx.targets[ALPHA], router=False, slots=slots, others={"lora": "lora-7"})
        gateway.ctx.targets = {ALPHA: target}
        gateway.ctx.names = {**gateway.ctx.names, "lora": ALPHA}
        yield gateway


@pytest.mark.parametrize("slots", [False, True])
async def test_its_conversations_are_not_followed(slots: bool) -> None:
    async with other(slots=slots) as gateway:
        gateway.upstream.scripts = [answer(TIMED)]
        assert (await gateway.call(CHAT)).status == 200
        await gateway.ctx.talks.idle()
        assert bool(gateway.ctx.talks.index.conversations(ALPHA)) is slots


async def test_it_is_told_nothing_that_only_a_router_knows_and_no_other_server_is_looked_for() -> None:
    async with other() as gateway:
        await gateway.call(CHAT)
        (seen,) = gateway.upstream.seen
        assert seen.query == {}
        assert seen.headers["Authorization"] == "Bearer server-key"


async def test_a_name_of_another_of_its_models_is_sent_as_it_calls_that() -> None:
    async with other() as gateway:
        for name in ("gpt-4o", "alpha", "lora"):
            await gateway.call({**CHAT, "model": name})
        bodies = [seen.body for seen in gateway.upstream.seen]
        assert [b'"alpha"' in bodies[0], b'"alpha"' in bodies[1], b'"lora-7"' in bodies[2]] == [True] * 3
