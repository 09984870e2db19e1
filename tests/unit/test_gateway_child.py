"""Where a router's model listens itself: calls go there, but only once it is sure who listens."""

from __future__ import annotations

from typing import cast

import aiohttp
import pytest

from swapper.gateway.child import Children
from swapper.gateway.context import Target
from tests.unit.gateway_doubles import ALPHA, CHAT, STREAM, Served, Upstream, answer, listen_as, serve


def port_of(server: Upstream) -> str:
    return server.url.rpartition(":")[2]


async def through_router(gateway: Served) -> bool:
    """Make a call; did it go through the router?"""
    assert (await gateway.call(CHAT)).status == 200
    return gateway.upstream.seen[-1].query == {"autoload": "false"}


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_calls_go_straight_to_the_child_which_is_looked_for_once(body: dict[str, object]) -> None:
    async with serve() as gateway:
        child = Upstream()
        runner = await listen_as(child)
        gateway.upstream.child, child.child = (port_of(child), "alpha"), ("", "alpha")
        for _ in range(3):
            assert (await gateway.call(body)).status == 200
        assert [(seen.path, seen.query) for seen in child.seen] == [("/v1/chat/completions", {})] * 3
        assert {seen.headers.get("Connection") for seen in [*child.seen, *child.looks]} == {"close"}
        assert gateway.upstream.seen == []
        assert [look.path for look in gateway.upstream.looks] == ["/models"]
        (look,) = child.looks
        assert "Authorization" not in look.headers
        await runner.cleanup()


async def test_who_says_it_is_another_model_gets_no_call() -> None:
    async with serve() as gateway:
        gateway.upstream.child = (port_of(gateway.upstream), "beta")
        assert await through_router(gateway)


@pytest.mark.parametrize("port", ["0", "1", "no number"])
async def test_a_child_that_cannot_be_reached_is_called_through_its_router(port: str) -> None:
    async with serve() as gateway:
        gateway.upstream.child = (port, "alpha")
        assert await through_router(gateway)


async def test_it_is_looked_for_again_once_the_gate_has_opened_again() -> None:
    async with serve() as gateway:
        assert await through_router(gateway)
        gateway.upstream.child = (port_of(gateway.upstream), "alpha")
        assert await through_router(gateway)
        gateway.admission.close(ALPHA, 2)
        gateway.admission.open(ALPHA, 3)
        assert not await through_router(gateway)


async def test_a_child_that_is_gone_is_looked_for_again() -> None:
    async with serve() as gateway:
        child = Upstream()
        runner = await listen_as(child)
        gateway.upstream.child, child.child = (port_of(child), "alpha"), ("", "alpha")
        gateway.upstream.scripts = [answer({"by": "router"})]
        assert (await gateway.call(CHAT)).json() == {"ok": True}
        await runner.cleanup()
        gateway.upstream.child = None
        assert (await gateway.call(CHAT)).json() == {"by": "router"}


@pytest.mark.parametrize("url", ["http://10.0.0.7:8080", "http://llama.example:8080"])
async def test_a_router_on_another_host_is_not_asked(url: str) -> None:
    children = Children(cast(aiohttp.ClientSession, None))
    assert await children.locate(Target(ALPHA, url, "alpha"), 1) is None


async def test_a_server_that_is_no_router_has_no_children() -> None:
    children = Children(cast(aiohttp.ClientSession, None))
    assert await children.locate(Target(ALPHA, "http://127.0.0.1:9", "alpha", router=False), 1) is None
