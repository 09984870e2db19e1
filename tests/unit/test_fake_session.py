"""The whole llama-router backend on a fake router in virtual time: no socket, no thread, no waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from tests.support.fake_child import FakeChild
from tests.support.fake_faults import Fault, Kind, Verb
from tests.support.fake_router import FakeRouter
from tests.support.fake_session import no_sockets
from tests.support.fake_slots import FakeModel
from tests.support.virtual_time import virtual
from workers.backend import SaveArgs, TenantState
from workers.llama import lifecycle
from workers.llama import router as router_module
from workers.llama.http import READ_S
from workers.llama.router import LlamaRouter

URL, ALPHA = "http://fake", "llama/alpha"


@asynccontextmanager
async def backed(folder: Path) -> AsyncGenerator[tuple[FakeRouter, LlamaRouter]]:
    gguf = folder / "alpha.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    slot_dir = folder / "slots"
    slot_dir.mkdir()
    router = FakeRouter([FakeModel("alpha", str(gguf))], slot_dir=slot_dir)
    router.start()
    backend = LlamaRouter(URL, tenants={ALPHA: "alpha"}, state_dir=folder, slot_dir=slot_dir)
    with no_sockets({URL: router}):
        await backend.start()
        try:
            yield router, backend
        finally:
            await backend.close()
            await router.close()


@virtual
async def test_a_conversation_survives_a_release_and_a_load(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        await backend.load(ALPHA)
        body = {"model": "alpha", "prompt": "a long story", "id_slot": 0, "n_predict": 8}
        await router.request("POST", "/completion", body=json.dumps(body).encode())
        [use] = (await backend.quiesce(ALPHA)).slots
        saved = await backend.save(ALPHA, SaveArgs(0, "a.kv"))
        assert saved.tokens == use.tokens
        await backend.release(ALPHA, limit_ms=1000)
        assert router.vram.used_mib == 0
        assert [s.refused for s in (await backend.load(ALPHA)).snapshots] == [None]
        assert (await backend.restore(ALPHA, "a.kv", 0)).tokens == saved.tokens
        answer = await router.request("POST", "/completion", body=json.dumps(body).encode())
        assert answer.json()["timings"]["cache_n"] == len("a long story")


@virtual
async def test_a_read_that_hangs_ends_at_its_limit(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        began = asyncio.get_running_loop().time()
        router.faults.set(Fault(Verb.MODELS, Kind.HANG, times=None))
        assert await backend.observe() == {ALPHA: TenantState.UNREACHABLE}
        assert asyncio.get_running_loop().time() - began == pytest.approx(READ_S)


@virtual
async def test_a_connection_that_was_dropped_is_tried_again_for_a_read_and_never_for_an_order(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        router.faults.set(Fault(Verb.MODELS, Kind.DROP), Fault(Verb.LOAD, Kind.DROP))
        assert await backend.observe() == {ALPHA: TenantState.UNLOADED}
        with pytest.raises(BackendDown) as caught:
            await backend.load(ALPHA)
        assert not isinstance(caught.value, BackendGone)


@virtual
async def test_a_router_that_ended_is_gone(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        router.die()
        assert await backend.observe() == {ALPHA: TenantState.STOPPED}


@virtual
async def test_a_refusal_is_told_in_the_servers_words(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        router.faults.set(Fault(Verb.LOAD, Kind.ERROR, status=500))
        with pytest.raises(BackendRefused, match="made to fail"):
            await backend.load(ALPHA)


@virtual
async def test_a_child_that_loads_and_then_answers_nothing_does_not_stay(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        router.faults.set(Fault(Verb.LOAD, Kind.MUTE))
        with pytest.raises(BackendDown):
            await backend.load(ALPHA)
        assert router.vram.used_mib == 0
        await backend.load(ALPHA)


@virtual
async def test_neither_does_one_whose_load_was_answered_with_an_error(tmp_path: Path) -> None:
    async with backed(tmp_path) as (router, backend):
        router.faults.set(Fault(Verb.LOAD, Kind.MUTE), Fault(Verb.LOAD, Kind.ERROR, after=True))
        for _ in range(2):
            with pytest.raises(BackendError):
                await backend.load(ALPHA)
            await asyncio.sleep(1)  # it goes on
        assert router.vram.used_mib == 0
        await backend.load(ALPHA)


@dataclass(frozen=True)
class Process:
    """A fake child, as the product would find its process."""

    child: FakeChild

    def alive(self) -> bool:
        return self.child.alive

    def ticks(self) -> int:
        return time.monotonic_ns()

    def environ(self) -> tuple[str, ...]:
        return ()


async def gone(process: Process, *, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.child.ended()
    return not process.alive()


@virtual
async def test_what_a_dead_router_left_behind_is_counted_although_the_next_one_knows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backed(tmp_path) as (router, backend):

        def find(model: str, port: str) -> Process:
            child = router.child(model, port)
            assert child is not None
            return Process(child)

        monkeypatch.setattr(router_module, "find_child", find)
        monkeypatch.setattr(lifecycle, "gone", gone)
        await router.request("POST", "/models/load", body=b'{"model": "alpha"}')
        await asyncio.sleep(1)
        assert await backend.observe() == {ALPHA: TenantState.LOADED}
        router.die()
        router.start()
        assert await backend.observe() == {ALPHA: TenantState.UNREACHABLE}
        await backend.release(ALPHA, limit_ms=5000)
        assert router.vram.used_mib == 0
        assert await backend.observe() == {ALPHA: TenantState.UNLOADED}
