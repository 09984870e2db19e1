"""Every limit of the product runs on the loop's own clock: in virtual time it ends when its seconds passed there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swapper.coordinator import Coordinator
from swapper.core.orders import Report, answer_to
from swapper.core.spec import CardSpec, PolicySpec, Spec
from swapper.core.types import LeaseRequest, LeaseState, WorkClass
from swapper.errors import BackendDown, BackendError, BackendGone, BackendStalled
from swapper.store.memory import MemoryStore
from tests.support.fake_child import ChildGone, Pace
from tests.support.fake_faults import Fault, Kind, Verb
from tests.support.fake_router import FakeRouter
from tests.support.fake_session import no_sockets
from tests.support.fake_slots import FakeModel
from tests.support.virtual_time import virtual
from workers.llama.lifecycle import Limits
from workers.llama.router import LlamaRouter

URL, ALPHA = "http://fake", "llama/alpha"


@asynccontextmanager
async def backed(folder: Path, *, pace: Pace | None = None) -> AsyncGenerator[tuple[FakeRouter, LlamaRouter]]:
    gguf = folder / "alpha.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    router = FakeRouter([FakeModel("alpha", str(gguf), stop_timeout_s=600)], pace=pace)
    router.start()
    limits = Limits(load_s=20, start_s=5)
    backend = LlamaRouter(URL, tenants={ALPHA: "alpha"}, state_dir=folder, limits=limits)
    with no_sockets({URL: router}):
        await backend.start()
        try:
            yield router, backend
        finally:
            await backend.close()
            await router.close()


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_a_load_without_progress_ends_at_its_limit(tmp_path: Path) -> None:
    async with backed(tmp_path, pace=Pace(load_s=600)) as (_, backend):
        with pytest.raises(BackendStalled, match="no progress"):
            await backend.load(ALPHA)
        assert 20 <= now() < 25


@virtual
async def test_a_release_that_nothing_here_can_force_gives_up_after_its_limit(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        await backend.load(ALPHA)
        began = now()
        child = router.child("alpha")
        assert child is not None
        long = asyncio.create_task(child.serve(asyncio.sleep(500)))
        with pytest.raises(BackendError, match="still there"):
            await backend.release(ALPHA, limit_ms=2000)
        assert 17 <= now() - began < 20
        await router.close()
        with pytest.raises(ChildGone):
            await long


@virtual
async def test_a_router_that_is_not_there_is_waited_for_as_long_as_one_takes_to_start(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        router.die()
        began = now()
        with pytest.raises(BackendGone):
            await backend.load(ALPHA)
        assert 5 <= now() - began < 7


@virtual
async def test_the_coordinators_view_ages_while_nothing_but_reports_wakes_it() -> None:
    store = MemoryStore(lambda: int(1_000_000 + now() * 1000))
    spec = Spec({"gpu0": CardSpec("gpu0", 1000)}, {}, PolicySpec(dict.fromkeys(WorkClass, 1000)))
    ids = itertools.count()
    coordinator = asyncio.create_task(Coordinator(store, spec, lambda prefix: f"{prefix}{next(ids)}").run())
    await asyncio.sleep(0.1)
    await store.report(Report("agent:main", "", None, 0, 0, "hello", "ok", data={"mark": 0}))
    await store.enqueue(LeaseRequest("me", ttl_ms=5000), lease_id="ls1", max_queue=9)
    (order,) = await store.outbox("agent:main", after="0", block_ms=5000)
    await store.report(answer_to(order.command, "ok"))
    talk = Report("agent:main", "", None, 0, 0, "observed", "ok", data={})
    while (lease := await store.lease("ls1")) is None or lease.state is not LeaseState.EXPIRED:
        await store.report(talk)  # so that it never waits as long as a look takes
        await asyncio.sleep(0.1)
        assert now() < 8
    coordinator.cancel()


@virtual
async def test_a_load_that_was_cut_is_not_repeated_while_what_it_began_may_be_there(tmp_path: Path) -> None:
    """The router died before it answered, and is back at once."""
    async with backed(tmp_path) as (router, backend):
        router.faults.set(Fault(Verb.LOAD, Kind.LATE, after=True, seconds=5))
        loading = asyncio.create_task(backend.load(ALPHA))
        await asyncio.sleep(1)
        router.die()
        router.start()
        with pytest.raises(BackendDown):
            await loading
        again = asyncio.create_task(backend.load(ALPHA))
        await asyncio.sleep(router.pace.orphan_s - 0.1)
        assert router.vram.used_mib == FakeModel("alpha").vram_mib
        await again


@virtual
async def test_a_load_whose_router_died_is_asked_for_again_once_the_process_left_behind_is_gone(tmp_path: Path) -> None:
    async with backed(tmp_path, pace=Pace(load_s=4)) as (router, backend):
        loading = asyncio.create_task(backend.load(ALPHA))
        await asyncio.sleep(1)
        router.die()
        await asyncio.sleep(0.1)
        router.start()
        most = 0
        while not loading.done():
            most = max(most, router.vram.used_mib)
            await asyncio.sleep(0.05)
        await loading
        assert most == FakeModel("alpha").vram_mib
