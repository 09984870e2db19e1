"""Ollama and llama-swap in particular: names, embeddings, what is taken back, who else lives there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swapper.errors import BackendError, BackendRefused
from tests.support import fake_kinds
from tests.support.fake_kind import FakeKind, Starter
from workers.backend import Backend, TenantState
from workers.control.attach import AttachControl
from workers.kind import Limits
from workers.llama_swap import LlamaSwap
from workers.ollama import Ollama, runners, same

LIMITS = Limits(load_s=20.0, answer_s=20.0, start_s=20.0, settle_s=0.5, read_s=10.0, poll_s=0.005)


@asynccontextmanager
async def running(fake: FakeKind, backend: Backend) -> AsyncGenerator[None]:
    await fake.start()
    try:
        yield
    finally:
        await backend.close()
        await fake.vanish()


def ollama(
    fake: FakeKind, *models: str, keep_alive_ms: int | None = None, keys: dict[str, str] | None = None
) -> Ollama:
    return Ollama(
        fake.url,
        server="s",
        tenants={f"s/{model}": model for model in models},
        control=AttachControl("s"),
        ours=False,
        keep_alive_ms=keep_alive_ms,
        keys=keys,
        limits=LIMITS,
    )


def swap(fake: FakeKind, *models: str) -> LlamaSwap:
    tenants = {f"s/{model}": model for model in models}
    return LlamaSwap(fake.url, server="s", tenants=tenants, control=AttachControl("s"), ours=False, limits=LIMITS)


@pytest.mark.parametrize(
    ("one", "other"),
    [("m", "m:latest"), ("Org/M:Q4", "org/m:q4"), ("host:5000/org/m", "host:5000/org/m:latest")],
)
def test_two_names_of_one_model_are_the_same(one: str, other: str) -> None:
    assert same(one) == same(other)
    assert same("m:8b") != same("m")


@pytest.mark.parametrize("old", [False, True], ids=["tells what models can do", "does not tell"])
async def test_an_embedding_model_is_loaded_by_an_embedding_and_unloaded(old: bool) -> None:
    fake = fake_kinds.Ollama("chat", embeds=("nomic",))
    fake.old = old
    backend = ollama(fake, "nomic", "chat")
    async with running(fake, backend):
        await backend.load("s/nomic")
        assert fake.computed == ["nomic"]
        assert (await backend.observe())["s/nomic"] is TenantState.LOADED
        await backend.load("s/chat")
        assert fake.computed == ["nomic", "chat"]
        await backend.release("s/nomic", limit_ms=5_000)
        assert (await backend.observe()) == {"s/nomic": TenantState.UNLOADED, "s/chat": TenantState.LOADED}


@pytest.mark.parametrize(("configured", "sent"), [(None, -1), (1_800_000, "1800000ms")])
async def test_what_is_loaded_stays_as_long_as_is_configured(configured: int | None, sent: object) -> None:
    fake = fake_kinds.Ollama("m")
    backend = ollama(fake, "m", keep_alive_ms=configured)
    async with running(fake, backend):
        await backend.load("s/m")
        assert fake.listed == {"m": sent}


async def test_what_somebody_else_loaded_is_kept_by_a_load_that_computes_nothing() -> None:
    fake = fake_kinds.Ollama("m")
    backend = ollama(fake, "m")
    async with running(fake, backend):
        fake.have("m", "5m")
        await backend.load("s/m")
        assert (fake.listed, fake.computed) == ({"m": -1}, [])


async def test_an_unload_that_a_call_takes_back_is_asked_for_again() -> None:
    fake = fake_kinds.Ollama("m")
    backend = ollama(fake, "m")
    async with running(fake, backend):
        await backend.load("s/m")
        fake.rearms = 1
        async with asyncio.timeout(20):
            await backend.release("s/m", limit_ms=1_000_000)
        assert not fake.listed


async def test_what_hangs_in_stopping_ends_by_a_restart_and_that_is_said() -> None:
    fake = fake_kinds.Ollama("m")
    control = Starter(fake)
    backend = Ollama(fake.url, server="s", tenants={"s/m": "m"}, control=control, limits=LIMITS)
    async with running(fake, backend):
        await backend.load("s/m")
        fake.stuck = True
        said = await backend.release("s/m", limit_ms=200)
        assert control.orders[-1] == "restart"
        assert said == "m was still loaded 0.2 s after its unload, so that its server was started anew"


async def test_models_that_nobody_configured_are_seen_and_may_be_sent_away_but_not_brought() -> None:
    fake = fake_kinds.Ollama("m", "other")
    backend = ollama(fake, "m")
    async with running(fake, backend):
        fake.have("other")
        assert (await backend.observe())["s/other:latest"] is TenantState.LOADED
        with pytest.raises(BackendRefused):
            await backend.load("s/other:latest")
        await backend.release("s/other:latest", limit_ms=5_000)
        assert (await backend.observe())["s/other:latest"] is TenantState.UNLOADED


async def test_a_stranger_of_a_server_that_fell_silent_counts_as_there() -> None:
    fake = fake_kinds.LlamaSwap("m", "other")
    backend = swap(fake, "m")
    async with running(fake, backend):
        fake.have("other")
        await backend.observe()
        fake.status = 503
        assert await backend.observe() == {"s/other": TenantState.UNREACHABLE, "s/m": TenantState.UNREACHABLE}


async def test_a_model_with_a_key_of_its_own_is_asked_with_that() -> None:
    fake = fake_kinds.Ollama("m")
    backend = ollama(fake, "m", keys={"s/m": "secret"})
    async with running(fake, backend):
        await backend.load("s/m")
        generate = next(n for n, asked in enumerate(fake.asked) if asked == "POST /api/generate")
        assert fake.keys[generate] == "Bearer secret"


async def test_a_call_that_does_not_come_through_swapper_is_seen_in_the_event_stream_behind_long_logs() -> None:
    fake = fake_kinds.LlamaSwap("m", "org/n")
    fake.loud = 1_000_000
    backend = swap(fake, "m", "org/n")
    async with running(fake, backend):
        await backend.load("s/m")
        await backend.load("s/org/n")
        fake.begin("m")
        with pytest.raises(BackendError, match="at the server: 1"):
            await backend.quiesce("s/m", limit_ms=1_000)
        await backend.quiesce("s/org/n", limit_ms=5_000)
        await backend.release("s/org/n", limit_ms=5_000)
        assert fake.cut == 0
        assert fake.holding == {"m"}


async def test_when_the_time_for_calls_is_up_they_are_cut() -> None:
    fake = fake_kinds.LlamaSwap("m")
    backend = swap(fake, "m")
    async with running(fake, backend):
        await backend.load("s/m")
        fake.begin("m")
        async with asyncio.timeout(20):
            await backend.release("s/m", limit_ms=100)
        assert fake.cut == 1
        assert not fake.holding


async def test_without_an_event_stream_what_the_gateway_counts_is_enough() -> None:
    fake = fake_kinds.LlamaSwap("m")
    fake.silent = True
    backend = swap(fake, "m")
    async with running(fake, backend):
        await backend.load("s/m")
        fake.begin("m")
        await backend.quiesce("s/m", limit_ms=5_000)


@pytest.mark.parametrize(
    ("word", "state"),
    [("starting", TenantState.LOADING), ("ready", TenantState.LOADED), ("stopping", TenantState.LOADED)],
)
async def test_what_starts_or_stops_holds_its_vram(word: str, state: TenantState) -> None:
    fake = fake_kinds.LlamaSwap("m")
    backend = swap(fake, "m")
    async with running(fake, backend):
        fake.states["m"] = word
        assert await backend.observe() == {"s/m": state}


async def test_a_server_that_hangs_is_started_anew_where_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kind.ROUTER_HUNG_S", 0.0)
    fake = fake_kinds.Ollama("m")
    control = Starter(fake)
    limits = replace(LIMITS, read_s=0.2)
    backend = Ollama(fake.url, server="s", tenants={"s/m": "m"}, control=control, limits=limits)
    async with running(fake, backend):
        fake.hangs = True
        for _ in range(3):
            await backend.observe()
        assert await backend.end_hung() is None
        await asyncio.gather(backend.observe(), backend.observe())
        said = await backend.end_hung()
        assert said is not None
        assert control.orders == ["restart"]
        assert await backend.observe() == {"s/m": TenantState.UNLOADED}


async def test_one_that_is_silent_while_it_loads_for_us_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kind.ROUTER_HUNG_S", 0.0)
    fake = fake_kinds.Ollama("m")
    control = Starter(fake)
    limits = replace(LIMITS, read_s=0.1)
    backend = Ollama(fake.url, server="s", tenants={"s/m": "m"}, control=control, limits=limits)
    async with running(fake, backend):
        fake.slow = asyncio.Event()
        load = asyncio.create_task(backend.load("s/m"))
        await fake.generating.wait()
        fake.hangs = True
        for _ in range(5):
            await backend.observe()
        assert await backend.end_hung() is None
        fake.hangs = False
        fake.slow.set()
        await load
        assert control.orders == ["ensure"]
        assert await backend.end_hung() is None


async def test_a_release_waits_for_the_end_of_a_runner_that_is_listed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_kinds.Ollama("m")
    backend = ollama(fake, "m")
    alive = [3]

    def counted(servers: tuple[int, ...]) -> int:
        assert servers == (os.getpid(),)
        assert not fake.listed
        alive[0] -= 1
        return alive[0]

    monkeypatch.setattr("workers.ollama.runners", counted)
    async with running(fake, backend):
        await backend.load("s/m")
        await backend.observe()
        await backend.release("s/m", limit_ms=60_000)
        assert alive == [0]


def test_runners_are_those_children_of_a_server_that_are_called_so(tmp_path: Path) -> None:
    for name in ("runner", "other"):
        (tmp_path / name).write_text("import sys; sys.stdin.read()")
    before = runners([os.getpid()])

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ollama", name], executable=sys.executable, cwd=tmp_path, stdin=subprocess.PIPE)

    with start("runner") as one, start("other") as other:
        seen = runners([os.getpid(), 4_194_304])
        one.kill()
        other.kill()
    assert seen == before + 1
    assert runners([os.getpid()]) == before
