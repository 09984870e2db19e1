"""swapper is killed with -9 while a lease holds the card and others wait; the real llama-server must not notice."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.store import embedded
from swapper.store.redis import RedisStore
from tests.support.matrix import ends
from tests.support.router import RealRouter
from tests.support.server import Server, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(Server.of_alpha(tmp_path)) as server:
        yield server


def _items(server: Server) -> list[dict[str, object]]:
    listed = cast("list[dict[str, object]]", server.get("/api/leases?limit=10")["items"])
    return sorted(listed, key=lambda lease: str(lease["id"]))


def test_after_kill_9_the_same_leases_stand_in_the_same_order_and_the_next_token_is_higher(server: Server) -> None:
    assert server.chat("alpha", "hello")["choices"]
    held = server.lease("held", wait=30)
    assert held["state"] == "granted"
    waiting = [server.lease(label) for label in ("first", "second", "third")]
    before = _items(server)
    children = _processes(server.router)

    server.kill()
    server.start()

    after = _items(server)
    assert [(x["id"], x["state"], x["token"], x["position"]) for x in after] == [
        (x["id"], x["state"], x["token"], x["position"]) for x in before
    ]
    assert _processes(server.router) == children, "llama-server was not touched"
    server.release(held)
    granted = server.get(f"/api/leases/{waiting[0]['id']}?wait=30")
    assert granted["state"] == "granted"
    assert cast("int", granted["token"]) > cast("int", held["token"])


def _processes(router: RealRouter) -> set[tuple[int, float]]:
    """The router and its children, each with its start time."""
    top = psutil.Process(router.pid)
    return {(process.pid, process.create_time()) for process in (top, *top.children(recursive=True))}


def test_after_kill_9_in_the_middle_of_an_answer_a_swap_waits_for_the_servers_and_not_for_the_dead_gateway(
    server: Server,
) -> None:
    server.chat("alpha", "hello")
    messages = [{"role": "user", "content": "on and on"}]
    body = {"model": "alpha", "messages": messages, "stream": True, "ignore_eos": True}
    call = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=30) as answer:
        assert answer.readline().startswith(b"data:")
        server.kill()
    asyncio.run(_prolong_memberships(server))

    server.start()

    assert server.lease("next", wait=30)["state"] == "granted"
    (swap,) = (swap for swap in server.swaps() if swap["from"])
    steps = cast("list[dict[str, object]]", swap["steps"])
    assert [(step["step"], step["outcome"]) for step in steps][:2] == [("close", "done"), ("drain", "done")]


async def _prolong_memberships(server: Server) -> None:
    """What the dead gateways' memberships have left becomes an hour: whoever waits for their end waits too long."""
    found = embedded.running(server.state_dir)
    assert found is not None
    store = await RedisStore.open(found.url)
    gateways = (await store.read()).gateways
    assert gateways
    for gateway in gateways:
        await store.beat(gateway, (), ttl_ms=3_600_000)
    await store.close()


def test_a_store_killed_with_9_is_back_with_every_lease_and_the_queue_goes_on(server: Server) -> None:
    server.chat("alpha", "hello")
    held = server.lease("held", wait=30)
    waiting = server.lease("waiting")
    (store,) = (p for p in psutil.Process(1).children(recursive=True) if _is_store(p, server))
    ends(store)
    server.wait_ready()
    assert server.get(f"/api/leases/{held['id']}")["state"] == "granted"
    server.release(held)
    granted = server.get(f"/api/leases/{waiting['id']}?wait=30")
    assert granted["state"] == "granted"
    assert cast("int", granted["token"]) > cast("int", held["token"])


def _is_store(process: psutil.Process, server: Server) -> bool:
    try:
        return str(server.state_dir) in " ".join(process.cmdline()) and "valkey" in process.name()
    except psutil.Error:
        return False
