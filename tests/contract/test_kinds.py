"""What every kind of server without slots keeps to, on doubles that lie as the real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from tests.support import fake_kinds
from tests.support.fake_kind import FakeKind, OpenAi, Starter
from workers.backend import Backend, SaveArgs, SaveUnsupported, TenantState
from workers.client import ServerClient
from workers.control import Control
from workers.control.attach import AttachControl
from workers.kind import Limits
from workers.llama_swap import LlamaSwap
from workers.ollama import Ollama
from workers.openai import OpenAiServer
from workers.sglang import Sglang
from workers.vllm import Vllm

LIMITS = Limits(load_s=20.0, answer_s=20.0, start_s=20.0, settle_s=0.2, read_s=10.0, poll_s=0.005)
IMPATIENT = replace(LIMITS, read_s=0.2)
LONG_MS = 60_000
SHORT_MS = 200

Make = Callable[[FakeKind, Control, bool, str, Path, Limits], Backend]


@dataclass(frozen=True)
class Case:
    """A kind, how it is controlled, and its tenant."""

    name: str
    fake: Callable[[str], FakeKind]
    make: Make
    tenant: str
    ours: bool
    counts: bool = True

    def __str__(self) -> str:
        return self.name


@dataclass
class Stand:
    """A backend on its double."""

    case: Case
    fake: FakeKind
    control: Control
    backend: Backend
    folder: Path

    @asynccontextmanager
    async def impatient(self) -> AsyncGenerator[Backend]:
        """The next process of swapper, which waits for no answer for long."""
        backend = self.case.make(self.fake, self.control, self.case.ours, "m", self.folder, IMPATIENT)
        try:
            yield backend
        finally:
            await backend.close()

    @property
    def tenant(self) -> str:
        return self.case.tenant

    async def goes_on(self, task: asyncio.Task[Any], looks: int) -> None:
        """It is not over when the server was asked so many times more."""
        looked = asyncio.create_task(self.fake.looked(looks))
        await asyncio.wait({task, looked}, return_when=asyncio.FIRST_COMPLETED)
        looked.cancel()
        assert not task.done()

    async def state(self) -> TenantState:
        return (await self.backend.observe())[self.tenant]


def _ollama(fake: FakeKind, control: Control, ours: bool, model: str, folder: Path, limits: Limits) -> Backend:
    return Ollama(fake.url, server="s", tenants={"s/m": model}, control=control, ours=ours, limits=limits)


def _llama_swap(fake: FakeKind, control: Control, ours: bool, model: str, folder: Path, limits: Limits) -> Backend:
    return LlamaSwap(fake.url, server="s", tenants={"s/m": model}, control=control, ours=ours, limits=limits)


def _whole(kind: str, level: int = 0) -> Make:
    def make(fake: FakeKind, control: Control, ours: bool, model: str, folder: Path, limits: Limits) -> Backend:
        http = ServerClient(fake.url, kind, read_s=limits.read_s)
        engine = {
            "vLLM": lambda: Vllm(http, level or 1, folder / "servers" / "s"),
            "SGLang": lambda: Sglang(http, level or 1, folder / "servers" / "s", lambda: None),
            "the server": lambda: None,
        }[kind]()
        return OpenAiServer(
            http, tenant="s", models=[model], control=control, ours=ours, engine=engine, rests=level > 0, limits=limits
        )

    return make


CASES = [
    Case("ollama, attached", fake_kinds.Ollama, _ollama, "s/m", ours=False, counts=False),
    Case("ollama", fake_kinds.Ollama, _ollama, "s/m", ours=True, counts=False),
    Case("llama-swap, attached", fake_kinds.LlamaSwap, _llama_swap, "s/m", ours=False),
    Case("llama-swap", fake_kinds.LlamaSwap, _llama_swap, "s/m", ours=True),
    Case("vllm, attached, sleep 1", fake_kinds.Vllm, _whole("vLLM", 1), "s", ours=False),
    Case("vllm, attached, sleep 2", fake_kinds.Vllm, _whole("vLLM", 2), "s", ours=False),
    Case("vllm, sleep 1", fake_kinds.Vllm, _whole("vLLM", 1), "s", ours=True),
    Case("vllm", fake_kinds.Vllm, _whole("vLLM"), "s", ours=True),
    Case("sglang, attached, sleep 1", fake_kinds.Sglang, _whole("SGLang", 1), "s", ours=False),
    Case("sglang, attached, sleep 2", fake_kinds.Sglang, _whole("SGLang", 2), "s", ours=False),
    Case("sglang", fake_kinds.Sglang, _whole("SGLang"), "s", ours=True),
    Case("openai", OpenAi, _whole("the server"), "s", ours=True, counts=False),
]
ATTACHED = [case for case in CASES if not case.ours]
OURS = [case for case in CASES if case.ours]
every = pytest.mark.parametrize("case", CASES, ids=str)


@asynccontextmanager
async def stand(case: Case, folder: Path, model: str = "m") -> AsyncGenerator[Stand]:
    """The server as swapper finds it: nothing is loaded. One that is not ours runs."""
    fake = case.fake("m")
    control: Control = Starter(fake) if case.ours else AttachControl("s")
    backend = case.make(fake, control, case.ours, model, folder, LIMITS)
    try:
        if not case.ours:
            await fake.start()
            if fake.holding:
                await backend.release(case.tenant, limit_ms=LONG_MS)
        await backend.start()
        fake.asked.clear()
        yield Stand(case, fake, control, backend, folder)
    finally:
        await backend.close()
        await fake.vanish()


@every
async def test_before_a_load_nothing_is_loaded_and_nothing_computes(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        assert await one.state() is TenantState.UNLOADED
        assert not one.fake.holding
        assert not one.fake.computed


@every
async def test_a_load_ends_with_its_smallest_real_call(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        assert one.fake.computed == ["m"]
        assert await one.state() is TenantState.LOADED
        assert one.fake.holding == {"m"}


@every
async def test_what_is_loaded_already_is_not_made_to_compute_by_a_load(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        await one.backend.load(one.tenant)
        assert one.fake.computed == ["m"]


@every
async def test_looking_wakes_and_changes_nothing(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        await one.backend.release(one.tenant, limit_ms=LONG_MS)
        before = len(one.fake.posts())
        for _ in range(3):
            assert await one.state() is TenantState.UNLOADED
        assert len(one.fake.posts()) == before
        assert one.fake.computed == ["m"]


@every
async def test_a_release_ends_when_it_is_seen_and_a_load_brings_it_back(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        await one.backend.release(one.tenant, limit_ms=LONG_MS)
        assert await one.state() is TenantState.UNLOADED
        await one.backend.load(one.tenant)
        assert await one.state() is TenantState.LOADED
        assert one.fake.computed == ["m", "m"]


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "openai"], ids=str)
async def test_a_release_waits_for_the_call_in_flight_and_cuts_none(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.begin("m")
        release = asyncio.create_task(one.backend.release(one.tenant, limit_ms=60_000))
        await one.goes_on(release, 12)
        one.fake.end("m")
        await release
        assert one.fake.cut == 0
        assert await one.state() is TenantState.UNLOADED
        await one.backend.load(one.tenant)


@pytest.mark.parametrize("case", [case for case in CASES if case.counts], ids=str)
async def test_what_a_server_counts_itself_is_waited_for_and_named(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.begin("m")
        with pytest.raises(BackendError, match="at the server: 1"):
            await one.backend.quiesce(one.tenant, limit_ms=500)
        quiet = asyncio.create_task(one.backend.quiesce(one.tenant))
        await one.goes_on(quiet, 6)
        one.fake.end("m")
        assert (await quiet).slots == ()


@pytest.mark.parametrize("case", [case for case in CASES if case.counts], ids=str)
async def test_silence_is_no_end_of_calls(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.begin("m")
        async with one.impatient() as backend:
            quiet = asyncio.create_task(backend.quiesce(one.tenant))
            await one.goes_on(quiet, 4)
            one.fake.hangs = True
            await one.goes_on(quiet, 2)
            one.fake.hangs = False
            await one.goes_on(quiet, 2)
            one.fake.end("m")
            await quiet


@every
async def test_what_is_not_loaded_is_quiet_and_gone(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        assert (await one.backend.quiesce(one.tenant, limit_ms=LONG_MS)).gone


@every
async def test_a_server_that_hangs_counts_as_there(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.hangs = True
        async with one.impatient() as backend:
            assert (await backend.observe())[one.tenant] is TenantState.UNREACHABLE


@pytest.mark.parametrize("case", ATTACHED, ids=str)
async def test_a_release_from_a_server_that_hangs_fails_in_time_where_nobody_here_can_end_it(
    case: Case, tmp_path: Path
) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.hangs = True
        async with one.impatient() as backend:
            with pytest.raises(BackendError):
                await backend.release(one.tenant, limit_ms=SHORT_MS)
        assert one.fake.holding == {"m"}


@pytest.mark.parametrize("case", OURS, ids=str)
async def test_a_release_from_a_server_that_hangs_ends_it_where_it_is_ours(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.hangs = True
        async with one.impatient() as backend:
            await backend.release(one.tenant, limit_ms=SHORT_MS)
        assert not one.fake.holding
        assert await one.state() is TenantState.UNLOADED


@every
async def test_a_server_that_answers_with_errors_counts_as_there_and_a_load_says_what_it_said(
    case: Case, tmp_path: Path
) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.status = 500
        assert await one.state() is TenantState.UNREACHABLE
        with pytest.raises(BackendError, match="the disk is on fire"):
            await one.backend.load(one.tenant)


@pytest.mark.parametrize("case", ATTACHED, ids=str)
async def test_a_server_that_vanished_holds_nothing_and_a_load_says_who_is_missing(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        await one.fake.vanish()
        assert await one.state() is TenantState.STOPPED
        await one.backend.release(one.tenant, limit_ms=LONG_MS)
        with pytest.raises(BackendGone, match="start it there"):
            await one.backend.load(one.tenant)


@pytest.mark.parametrize("case", OURS, ids=str)
async def test_a_server_of_ours_that_vanished_is_started_again_by_a_load(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        await one.fake.vanish()
        assert not (await one.state()).holds_vram
        await one.backend.load(one.tenant)
        assert await one.state() is TenantState.LOADED


@pytest.mark.parametrize("case", ATTACHED, ids=str)
async def test_a_release_that_says_ok_and_frees_nothing_fails_and_is_seen(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.stuck = True
        with pytest.raises(BackendError):
            await one.backend.release(one.tenant, limit_ms=SHORT_MS)
        assert await one.state() is TenantState.LOADED


@pytest.mark.parametrize("case", OURS, ids=str)
async def test_what_is_stuck_is_ended_by_the_control_where_there_is_one(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        one.fake.stuck = True
        await one.backend.release(one.tenant, limit_ms=SHORT_MS)
        assert not one.fake.holding
        assert await one.state() is TenantState.UNLOADED


@every
async def test_a_model_that_the_server_does_not_have_is_said_in_words(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path, model="absent") as one:
        with pytest.raises(BackendRefused, match=r"has no model 'absent'; it has: m\b"):
            await one.backend.load(one.tenant)
        assert not one.fake.computed


@every
async def test_whoever_lost_its_claim_changes_nothing(case: Case, tmp_path: Path) -> None:
    async def fence() -> None:
        raise BackendDown("another agent has the claim")

    async with stand(case, tmp_path) as one:
        await one.backend.load(one.tenant)
        before = len(one.fake.posts())
        one.backend.fenced(fence)
        with pytest.raises(BackendError):
            await one.backend.release(one.tenant, limit_ms=SHORT_MS)
        assert len(one.fake.posts()) == before
        assert one.fake.holding == {"m"}


@every
async def test_no_conversation_is_kept(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        loaded = await one.backend.load(one.tenant)
        assert (loaded.n_slots, loaded.snapshots, loaded.strategies) == (0, (), ())
        assert (await one.backend.quiesce(one.tenant, limit_ms=LONG_MS)).slots == ()
        with pytest.raises(SaveUnsupported):
            await one.backend.save(one.tenant, SaveArgs(0, "x"))
        with pytest.raises(BackendRefused, match="no slots"):
            await one.backend.restore(one.tenant, "x", 0)


@every
async def test_a_tenant_of_another_server_is_refused(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        with pytest.raises(BackendRefused, match="no tenant of"):
            await one.backend.load("other/m")


@every
async def test_a_load_and_a_release_are_told_as_changes(case: Case, tmp_path: Path) -> None:
    async with stand(case, tmp_path) as one:
        changes = aiter(one.backend.changes())
        await anext(changes)
        change = asyncio.ensure_future(anext(changes))
        await one.backend.load(one.tenant)
        await change
