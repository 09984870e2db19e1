"""Where a router's model listens itself: calls go there, but only once it is sure who listens, and that it may be."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from swapper.gateway.child import AGAIN_S, Child, Children
from swapper.gateway.context import Target
from tests.unit.gateway_doubles import (
    ALPHA,
    CHAT,
    STREAM,
    Served,
    Stream,
    Upstream,
    answer,
    die,
    event,
    events_of,
    listen_as,
    serve,
)


def port_of(server: Upstream) -> str:
    return server.url.rpartition(":")[2]


async def through_router(gateway: Served) -> bool:
    """Make a call; did it go through the router?"""
    assert (await gateway.call(CHAT)).status == 200
    return gateway.upstream.seen[-1].query == {"autoload": "false"}


@asynccontextmanager
async def with_child() -> AsyncGenerator[tuple[Served, Upstream]]:
    """A gateway before a router that says of its answers that they are its own, and the child it names."""
    async with serve() as gateway:
        child = Upstream()
        runner = await listen_as(child)
        gateway.upstream.child, child.child = (port_of(child), "alpha"), ("", "alpha")
        gateway.upstream.scripts = [answer({"by": "router"})]
        yield gateway, child
        await runner.cleanup()


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_calls_go_straight_to_the_child_which_is_looked_for_once(body: dict[str, object]) -> None:
    async with with_child() as (gateway, child):
        for _ in range(3):
            assert (await gateway.call(body)).status == 200
        assert [(seen.path, seen.query) for seen in child.seen] == [("/v1/chat/completions", {})] * 3
        assert {seen.headers.get("Connection") for seen in [*child.seen, *child.looks]} == {"close"}
        assert gateway.upstream.seen == []
        assert [look.path for look in gateway.upstream.looks] == ["/models", "/props"]
        assert len(child.looks) == 1


async def test_the_child_gets_no_key_neither_the_routers_nor_the_clients() -> None:
    keys = {"Authorization": "Bearer client", "X-Api-Key": "client", "Api-Key": "client"}
    async with with_child() as (gateway, child):
        assert (await gateway.call(CHAT, headers=keys)).status == 200
        assert {look.headers["Authorization"] for look in gateway.upstream.looks} == {"Bearer server-key"}
        for seen in [*child.seen, *child.looks]:
            assert not {name.lower() for name in seen.headers} & {"authorization", "x-api-key", "api-key"}


async def test_who_says_it_is_another_model_gets_no_call() -> None:
    async with serve() as gateway:
        gateway.upstream.child = (port_of(gateway.upstream), "beta")
        assert await through_router(gateway)


@pytest.mark.parametrize("props", [{"max_instances": 4}, {}, {"max_instances": None}])
async def test_a_router_with_a_models_limit_or_that_names_none_counts_every_call(props: dict[str, object]) -> None:
    async with serve() as gateway:
        gateway.upstream.child, gateway.upstream.props = (port_of(gateway.upstream), "alpha"), props
        assert await through_router(gateway)


async def test_a_child_whose_process_cannot_be_seen_is_called_through_its_router() -> None:
    async with serve() as gateway:
        gateway.upstream.child, gateway.upstream.process = (port_of(gateway.upstream), "alpha"), None
        assert await through_router(gateway)


@pytest.mark.parametrize("port", ["0", "1", "no number"])
async def test_a_child_that_cannot_be_reached_is_called_through_its_router(port: str) -> None:
    async with serve() as gateway:
        gateway.upstream.child = (port, "alpha")
        assert await through_router(gateway)


# ---- when it is looked for


async def test_what_was_found_serves_until_the_gate_has_opened_again() -> None:
    async with serve() as gateway:
        gateway.upstream.child = (port_of(gateway.upstream), "alpha")
        assert not await through_router(gateway)
        gateway.upstream.child = None
        gateway.upstream.seconds += 1000 * AGAIN_S
        assert not await through_router(gateway)
        gateway.admission.close(ALPHA, 2)
        gateway.admission.open(ALPHA, 3)
        assert await through_router(gateway)


async def test_that_there_is_none_is_believed_for_some_seconds_only() -> None:
    async with serve() as gateway:
        assert await through_router(gateway)
        gateway.upstream.child = (port_of(gateway.upstream), "alpha")
        gateway.upstream.seconds += AGAIN_S - 0.1
        assert await through_router(gateway)
        gateway.upstream.seconds += 0.2
        assert not await through_router(gateway)


async def test_those_who_call_at_once_share_one_look_also_when_the_first_of_them_leaves() -> None:
    async with with_child() as (gateway, child):
        target, router = gateway.ctx.targets[ALPHA], gateway.upstream
        router.may_answer.clear()
        first, *others = [asyncio.create_task(gateway.ctx.children.locate(target, 1)) for _ in range(5)]
        await router.looked.wait()
        first.cancel()
        await asyncio.wait({first})
        others.append(asyncio.create_task(gateway.ctx.children.locate(target, 1)))
        router.may_answer.set()
        found = await asyncio.gather(*others)
        assert found[0] is not None
        assert {id(one) for one in found} == {id(found[0])}
        assert [look.path for look in [*router.looks, *child.looks]] == ["/models", "/props", "/props"]


async def test_a_call_that_broke_long_ago_does_not_forget_what_was_found_since() -> None:
    async with with_child() as (gateway, _):
        children, target = gateway.ctx.children, gateway.ctx.targets[ALPHA]
        found = await children.locate(target, 1)
        assert found is not None
        gateway.upstream.child = None
        children.forget(ALPHA, Child(found.url, found.process))
        assert await children.locate(target, 1) is found
        children.forget(ALPHA, found)
        assert await children.locate(target, 1) is None


async def test_a_look_after_the_gateway_has_stopped_finds_nobody() -> None:
    async with serve() as gateway:
        await gateway.ctx.session.close()
        assert await gateway.ctx.children.locate(gateway.ctx.targets[ALPHA], 1) is None


# ---- who answers


async def test_a_child_that_is_gone_is_looked_for_again() -> None:
    async with with_child() as (gateway, child):
        assert (await gateway.call(CHAT)).json() == {"ok": True}
        child.scripts = [die()]
        gateway.upstream.child = None
        assert (await gateway.call(CHAT)).json() == {"by": "router"}


async def test_once_its_process_has_ended_nobody_else_on_its_port_is_called() -> None:
    async with with_child() as (gateway, child):
        assert (await gateway.call(CHAT)).json() == {"ok": True}
        assert gateway.upstream.process is not None
        gateway.upstream.process.runs = False
        assert (await gateway.call(CHAT)).json() == {"by": "router"}
        assert len(child.seen) == 1


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_an_answer_is_not_taken_from_who_got_its_port_in_between(body: dict[str, object]) -> None:
    async with with_child() as (gateway, child):

        async def other(request: web.Request) -> web.StreamResponse:
            assert gateway.upstream.process is not None
            gateway.upstream.process.runs = False
            return web.json_response({"by": "another model"})

        child.scripts = [other]
        assert (await gateway.call(body)).json() == {"by": "router"}


async def test_a_call_that_breaks_after_its_first_bytes_makes_the_next_look_again() -> None:
    async with with_child() as (gateway, child):
        child.scripts = [Stream().put(event("1"), ConnectionError())]
        first, error, _ = events_of((await gateway.call(STREAM)).body)
        assert (first, error["error"]["code"]) == (1, "upstream_failed")
        gateway.upstream.child = None
        assert (await gateway.call(CHAT)).json() == {"by": "router"}


async def test_a_client_that_hangs_up_is_no_reason_to_look_again() -> None:
    async with with_child() as (gateway, child):
        child.scripts = [Stream().put(event("1")), answer({"ok": True})]
        async with gateway.post(STREAM) as response:
            await response.content.readany()
            response.close()
        await child.left.wait()
        assert (await gateway.call(CHAT)).json() == {"ok": True}
        assert len(child.looks) == 1


async def test_its_process_is_the_one_with_its_name_and_port_on_the_command_line() -> None:
    async with serve() as gateway:
        router, port = gateway.upstream, port_of(gateway.upstream)
        router.child = (port, "alpha")
        target = gateway.ctx.targets[ALPHA]
        children = Children(gateway.ctx.session)
        assert await children.locate(target, 1) is None
        words = [sys.executable, "-c", "print(flush=True); input()", "--alias", "alpha", "--port", port]
        process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            found = await children.locate(target, 2)
            assert found is not None
            assert found.process.alive()
        finally:
            process.kill()
            await process.wait()
        assert not found.process.alive()


@pytest.mark.parametrize("url", ["http://10.0.0.7:8080", "http://llama.example:8080"])
async def test_a_router_on_another_host_is_not_asked(url: str) -> None:
    children = Children(cast(aiohttp.ClientSession, None))
    assert await children.locate(Target(ALPHA, url, "alpha"), 1) is None


async def test_a_server_that_is_no_router_has_no_children() -> None:
    children = Children(cast(aiohttp.ClientSession, None))
    assert await children.locate(Target(ALPHA, "http://127.0.0.1:9", "alpha", router=False), 1) is None
