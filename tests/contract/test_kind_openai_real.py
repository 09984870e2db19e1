"""Kind openai on a real server with OpenAI's routes, started and ended by its real control: a llama-server will do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from swapper.errors import BackendError, BackendRefused
from tests.support.plain import PlainServer
from workers.backend import Owners, TenantState
from workers.client import ServerClient
from workers.control.attach import AttachControl
from workers.openai import OpenAiServer
from workers.vllm import gauges


@pytest.fixture
async def plain(tmp_path: Path, models: dict[str, Path]) -> AsyncIterator[PlainServer]:
    server = PlainServer(tmp_path / "plain", models["alpha"], arguments=["--alias", "alpha"])
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def backend(
    plain: PlainServer, stack: AsyncExitStack, *, model: str = "alpha", command: list[str] | None = None
) -> OpenAiServer:
    """As each new process of swapper would make it."""
    made = OpenAiServer(
        ServerClient(plain.url, "the server"), tenant="s", models=[model], control=plain.control(command)
    )
    stack.push_async_callback(made.close)
    return made


async def metrics(plain: PlainServer, stack: AsyncExitStack) -> str:
    client = ServerClient(plain.url, "it")
    stack.push_async_callback(client.close)
    return (await client.get("/metrics")).decode()


async def test_a_load_starts_it_and_ends_with_a_token_and_a_release_ends_its_process(
    plain: PlainServer, stack: AsyncExitStack
) -> None:
    one = backend(plain, stack)
    await one.start()
    assert await one.observe() == {"s": TenantState.UNLOADED}
    assert plain.control().pid() is None
    await one.load("s")
    pid = plain.control().pid()
    assert pid is not None
    assert await one.observe() == {"s": TenantState.LOADED}
    assert one.processes() == Owners({pid: "s"})
    assert gauges(await metrics(plain, stack), ("llamacpp:tokens_predicted_total",)) == 1
    await one.release("s", limit_ms=10_000)
    assert not psutil.pid_exists(pid)
    assert await one.observe() == {"s": TenantState.UNLOADED}


async def test_who_comes_next_adopts_it_and_one_that_is_attached_to_it_ends_nothing(
    plain: PlainServer, stack: AsyncExitStack
) -> None:
    await backend(plain, stack).load("s")
    pid = plain.control().pid()
    following = backend(plain, stack)
    assert await following.observe() == {"s": TenantState.LOADED}
    await following.load("s")
    assert plain.control().pid() == pid
    attached = OpenAiServer(
        ServerClient(plain.url, "the server"), tenant="s", models=["alpha"], control=AttachControl("s"), ours=False
    )
    stack.push_async_callback(attached.close)
    assert await attached.observe() == {"s": TenantState.LOADED}
    assert attached.processes() == Owners({pid: "s"} if pid is not None else {})
    with pytest.raises(BackendRefused, match="attached"):
        await attached.release("s", limit_ms=1_000)
    await following.release("s", limit_ms=10_000)
    assert await attached.observe() == {"s": TenantState.STOPPED}


async def test_a_start_that_fails_is_told_with_the_servers_own_words(
    plain: PlainServer, stack: AsyncExitStack, tmp_path: Path
) -> None:
    one = backend(plain, stack, command=[*plain.command, "--model", str(tmp_path / "absent.gguf")])
    with pytest.raises(BackendError, match=r"ended before it answered \(exit status 1\): .*absent\.gguf"):
        await one.load("s")
    assert await one.observe() == {"s": TenantState.FAILED}


async def test_a_name_that_it_does_not_serve_is_told_and_it_is_not_left_running(
    plain: PlainServer, stack: AsyncExitStack
) -> None:
    with pytest.raises(BackendRefused, match="has no model 'beta'; it has: alpha"):
        await backend(plain, stack, model="beta").load("s")
    assert plain.control().pid() is None
