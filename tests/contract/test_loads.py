"""A load on a real llama-server that makes no progress, or that nobody waits for any more: it does not stay."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from swapper.errors import BackendError, BackendStalled
from tests.contract.conftest import OurLog
from tests.support.plain import PlainServer
from tests.support.router import RealRouter
from workers.backend import Backend, TenantState
from workers.llama.lifecycle import Limits
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer
from workers.patience import GIVEN_UP

LIMITS = Limits(stall_s=1.0)
TENANT = "llama/alpha"


@pytest.fixture
async def routed(models: dict[str, Path], tmp_path: Path) -> AsyncIterator[tuple[Backend, RealRouter]]:
    router = RealRouter(tmp_path / "router", {"alpha": models["alpha"]}).start()
    control = OurLog(router)
    tenants = {TENANT: "alpha"}
    backend = LlamaRouter(router.url, tenants=tenants, state_dir=tmp_path / "s", control=control, limits=LIMITS)
    await backend.start()
    yield backend, router
    await backend.close()
    router.stop()


async def stopped(found: Callable[[], psutil.Process | None]) -> psutil.Process:
    """A process that is stopped as soon as it is there."""
    process = found()
    while process is None:
        await asyncio.sleep(0.001)  # a process that begins tells nobody
        process = found()
    process.send_signal(signal.SIGSTOP)
    return process


def begun(pid: int | None) -> psutil.Process | None:
    """The process, once it is llama-server's and no launcher's any more."""
    with suppress(psutil.Error):
        process = psutil.Process(pid) if pid is not None else None
        return process if process is not None and "llama" in Path(process.exe()).name else None
    return None


async def stopped_child(router: RealRouter) -> psutil.Process:
    """The router's first model."""

    def first() -> psutil.Process | None:
        for child in psutil.Process(router.pid).children():
            with suppress(psutil.Error):
                if "--alias" in child.cmdline():
                    return child
        return None

    return await stopped(first)


async def test_a_model_that_makes_no_progress_is_ended_and_the_next_load_begins_anew(
    routed: tuple[Backend, RealRouter],
) -> None:
    backend, router = routed
    loading = asyncio.ensure_future(backend.load(TENANT))
    child = await stopped_child(router)
    with pytest.raises(BackendStalled, match=r"alpha makes no progress in (loading|its first answer) for 1 s"):
        await loading
    assert not child.is_running()
    await backend.load(TENANT)
    assert (await backend.observe())[TENANT] is TenantState.LOADED


async def test_a_model_that_goes_on_in_time_is_loaded(routed: tuple[Backend, RealRouter]) -> None:
    backend, router = routed
    loading = asyncio.ensure_future(backend.load(TENANT))
    child = await stopped_child(router)
    await asyncio.sleep(0)
    os.kill(child.pid, signal.SIGCONT)
    assert (await loading).n_slots == 2
    assert child.is_running()


async def test_a_load_that_is_given_up_ends_and_its_process_goes_with_the_release(
    routed: tuple[Backend, RealRouter],
) -> None:
    backend, router = routed
    given_up = asyncio.Event()
    GIVEN_UP.set(given_up)
    loading = asyncio.ensure_future(backend.load(TENANT))
    child = await stopped_child(router)
    given_up.set()
    with pytest.raises(BackendError, match="alpha was given up"):
        await loading
    await backend.release(TENANT, limit_ms=10_000)
    assert not child.is_running()
    assert (await backend.observe())[TENANT] is TenantState.UNLOADED


async def test_a_plain_server_that_makes_no_progress_is_ended_and_started_anew(
    models: dict[str, Path], tmp_path: Path
) -> None:
    server = PlainServer(tmp_path / "plain", models["alpha"])
    control = server.control()
    backend = LlamaServer(server.url, tenant="chat", control=control, state_dir=tmp_path / "state", limits=LIMITS)
    try:
        loading = asyncio.ensure_future(backend.load("chat"))
        child = await stopped(lambda: begun(control.pid()))
        with pytest.raises(BackendStalled, match=r"chat makes no progress in (loading|its first answer) for 1 s"):
            await loading
        assert not child.is_running()
        await backend.load("chat")
        assert await backend.observe() == {"chat": TenantState.LOADED}
    finally:
        await backend.close()
        await asyncio.to_thread(server.stop)
