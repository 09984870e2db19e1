"""Servers that are their own tenant in particular: any with OpenAI's routes, vLLM and SGLang."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from swapper.errors import BackendError, BackendRefused, BackendStalled
from tests.support import fake_kinds
from tests.support.fake_control import FakeControl
from tests.support.fake_kind import FakeKind, OpenAi, Starter
from workers.backend import Owners, TenantState
from workers.client import ServerClient
from workers.control import Control, ExitStatus, Phase, Seen
from workers.control.attach import AttachControl
from workers.kind import Limits
from workers.openai import Engine, OpenAiServer
from workers.sglang import Sglang
from workers.smallest import smallest_call
from workers.vllm import Vllm, gauges

LIMITS = Limits(load_s=20.0, answer_s=20.0, start_s=20.0, settle_s=0.5, read_s=10.0, poll_s=0.005)


@asynccontextmanager
async def running(fake: FakeKind, *backends: OpenAiServer) -> AsyncGenerator[None]:
    await fake.start()
    try:
        yield
    finally:
        for backend in backends:
            await backend.close()
        await fake.vanish()


def server(
    fake: FakeKind,
    *,
    control: Control | None = None,
    models: Sequence[str] = ("m",),
    engine: Callable[[ServerClient], Engine] | None = None,
) -> OpenAiServer:
    http = ServerClient(fake.url, "the server", read_s=LIMITS.read_s)
    return OpenAiServer(
        http,
        tenant="s",
        models=models,
        control=control or AttachControl("s"),
        ours=control is not None,
        engine=None if engine is None else engine(http),
        rests=engine is not None,
        limits=LIMITS,
    )


def vllm(fake: FakeKind, folder: Path, level: int = 1, control: Control | None = None) -> OpenAiServer:
    return server(fake, control=control, engine=lambda http: Vllm(http, level, folder))


def sglang(fake: FakeKind, folder: Path, level: int = 1, control: Control | None = None) -> OpenAiServer:
    return server(fake, control=control, engine=lambda http: Sglang(http, level, folder, lambda: None))


# ---- any with OpenAI's routes


async def test_what_is_attached_and_does_not_rest_is_not_released() -> None:
    fake = OpenAi("m")
    backend = server(fake)
    async with running(fake, backend):
        with pytest.raises(BackendRefused, match="s is attached: stop it where it was started"):
            await backend.release("s", limit_ms=60_000)
        assert await backend.observe() == {"s": TenantState.LOADED}


async def test_a_server_that_lists_no_models_is_there_all_the_same() -> None:
    fake = OpenAi("m")
    fake.lists = False
    control = Starter(fake)
    backend = server(fake, control=control)
    async with running(fake, backend):
        assert await backend.observe() == {"s": TenantState.LOADED}
        await backend.release("s", limit_ms=60_000)
        await backend.load("s")
        assert fake.computed == ["m"]


async def test_all_names_it_is_to_serve_must_be_among_what_it_lists() -> None:
    fake = OpenAi("m", "lora")
    control = Starter(fake)
    backend, other = (
        server(fake, control=control, models=("m", "lora")),
        server(fake, control=control, models=("m", "x")),
    )
    async with running(fake, backend, other):
        await backend.release("s", limit_ms=60_000)
        with pytest.raises(BackendRefused, match="has no model 'x'; it has: m, lora"):
            await other.load("s")
        assert not fake.up
        await backend.load("s")


async def test_a_server_that_loads_holds_its_vram() -> None:
    fake = OpenAi("m")
    backend = server(fake)
    async with running(fake, backend):
        fake.status = 503
        assert await backend.observe() == {"s": TenantState.LOADING}


async def test_a_server_of_somebody_else_that_says_nothing_is_not_waited_for_as_long_as_a_load_may_take() -> None:
    fake = fake_kinds.Vllm("m")
    http = ServerClient(fake.url, "vLLM", read_s=0.1)
    limits = replace(LIMITS, load_s=1_000_000, start_s=0.3)
    control = AttachControl("s")
    backend = OpenAiServer(http, tenant="s", models=["m"], control=control, ours=False, limits=limits)
    async with running(fake, backend):
        fake.hangs = True
        with pytest.raises(BackendStalled, match="no progress"):
            await backend.load("s")


async def test_one_that_ended_while_it_loaded_is_told_with_the_last_words_of_its_log() -> None:
    class Ends(Starter):
        async def ensure(self) -> None:
            self.ended = ExitStatus(1, None, 0)

    fake = OpenAi("m")
    backend = server(fake, control=Ends(fake))
    with pytest.raises(BackendError, match=r"ended before it answered \(exit status 1\): CUDA error: out of memory"):
        await backend.load("s")
    assert await backend.observe() == {"s": TenantState.FAILED}
    await backend.close()


async def test_a_server_of_somebody_else_at_the_address_is_neither_used_nor_ended() -> None:
    class Elsewhere(Starter):
        def alive(self) -> bool | None:
            return False

    fake = OpenAi("m")
    control = Elsewhere(fake)
    backend = server(fake, control=control)
    async with running(fake, backend):
        assert await backend.observe() == {"s": TenantState.UNREACHABLE}
        with pytest.raises(BackendRefused, match="end that process"):
            await backend.load("s")
        assert control.orders == []


@pytest.mark.parametrize(
    ("models", "embeds", "chats", "computed"),
    [(("m",), (), True, ["m"]), ((), ("m",), True, ["m"]), (("m",), (), False, [])],
    ids=["chat", "embedding", "neither, and healthy"],
)
async def test_the_smallest_call_is_the_first_that_the_model_offers(
    models: tuple[str, ...], embeds: tuple[str, ...], chats: bool, computed: list[str]
) -> None:
    fake = OpenAi(*models, embeds=embeds)
    fake.chats = chats
    http = ServerClient(fake.url, "it")
    async with running(fake):
        await smallest_call(http, "m", 2.0)
        with pytest.raises(BackendRefused, match="`nobody` does not exist"):
            await smallest_call(http, "nobody", 2.0)
        await http.close()
    assert fake.computed == computed


async def test_the_key_of_the_server_goes_with_every_request() -> None:
    fake = OpenAi("m")
    fake.key = "secret"
    good, bad = ServerClient(fake.url, "it", "secret"), ServerClient(fake.url, "it")
    async with running(fake):
        await smallest_call(good, "m", 2.0)
        with pytest.raises(BackendRefused, match=r"it at .* answered 401 to /v1/models: unauthorized"):
            await bad.get("/v1/models")
        await good.close()
        await bad.close()


# ---- vLLM


async def test_the_flags_that_are_missing_for_sleep_are_named(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    fake.dev = False
    backend = vllm(fake, tmp_path)
    async with running(fake, backend):
        with pytest.raises(BackendRefused, match="--enable-sleep-mode and with VLLM_SERVER_DEV_MODE=1"):
            await backend.release("s", limit_ms=60_000)
        assert await backend.observe() == {"s": TenantState.LOADED}


async def test_one_of_ours_that_cannot_sleep_is_ended_instead_and_that_is_said(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    fake.dev = False
    backend = vllm(fake, tmp_path, control=Starter(fake))
    async with running(fake, backend):
        said = await backend.release("s", limit_ms=60_000)
        assert said is not None
        assert "--enable-sleep-mode" in said
        assert not fake.up


async def test_sleep_takes_its_level_from_the_query_and_level_two_reads_the_weights_before_the_cache_is_back(
    tmp_path: Path,
) -> None:
    fake = fake_kinds.Vllm("m")
    backend = vllm(fake, tmp_path, level=2)
    async with running(fake, backend):
        await backend.release("s", limit_ms=60_000)
        assert fake.level == 2
        await backend.load("s")
        changing = [one for one in fake.posts() if not one.startswith("POST /v1/")]
        assert changing == [
            "POST /sleep?level=2&mode=wait",
            "POST /wake_up?tags=weights",
            "POST /collective_rpc",
            "POST /wake_up?tags=kv_cache",
        ]


async def test_what_is_not_ours_and_woke_in_part_only_is_put_to_sleep_again(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    backend = vllm(fake, tmp_path)
    async with running(fake, backend):
        await backend.release("s", limit_ms=1_000)
        fake.wakes_badly = True
        with pytest.raises(BackendError, match="out of memory"):
            await backend.load("s")
        assert (await backend.observe(), fake.holding) == ({"s": TenantState.UNLOADED}, set())


async def test_what_woke_in_part_and_cannot_be_put_to_sleep_counts_as_there_until_it_is(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    backend, after = vllm(fake, tmp_path), vllm(fake, tmp_path)
    async with running(fake, backend, after):
        await backend.release("s", limit_ms=1_000)
        fake.wakes_badly = fake.sleepless = True
        with pytest.raises(BackendError, match="out of memory"):
            await backend.load("s")
        assert fake.holding  # though it says that it sleeps
        assert await backend.observe() == {"s": TenantState.UNREACHABLE}
        assert await after.observe() == {"s": TenantState.UNREACHABLE}
        with pytest.raises(BackendError):
            await after.end_hung()
        fake.sleepless = False
        assert "put to rest again" in str(await after.end_hung())
        assert (await after.observe(), fake.holding) == ({"s": TenantState.UNLOADED}, set())
        assert await after.end_hung() is None


async def test_what_woke_in_part_is_not_put_to_rest_with_a_call_in_it_and_is_there_once_all_of_it_woke(
    tmp_path: Path,
) -> None:
    fake = fake_kinds.Vllm("m")
    backend = vllm(fake, tmp_path)
    async with running(fake, backend):
        await backend.release("s", limit_ms=1_000)
        fake.wakes_badly = fake.sleepless = True
        with pytest.raises(BackendError, match="out of memory"):
            await backend.load("s")
        fake.wakes_badly = fake.sleepless = False
        fake.begin("m")
        assert await backend.end_hung() is None
        fake.end("m")
        await backend.load("s")
        assert await backend.observe() == {"s": TenantState.LOADED}
        assert await backend.end_hung() is None


async def test_what_somebody_else_woke_as_a_whole_is_torn_no_more(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    backend = vllm(fake, tmp_path)
    async with running(fake, backend):
        await backend.release("s", limit_ms=1_000)
        fake.wakes_badly = fake.sleepless = True
        with pytest.raises(BackendError, match="out of memory"):
            await backend.load("s")
        fake.away.clear()
        assert await backend.observe() == {"s": TenantState.LOADED}
        fake.away.add("weights")
        assert await backend.observe() == {"s": TenantState.UNLOADED}


async def test_one_that_dies_over_its_waking_is_gone_and_is_there_where_it_was_started_anew(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    backend = vllm(fake, tmp_path, level=2)
    async with running(fake, backend):
        await backend.release("s", limit_ms=1_000)
        fake.dies_waking = True
        with pytest.raises(BackendError):
            await backend.load("s")
        assert await backend.observe() == {"s": TenantState.STOPPED}
        await fake.start()
        assert await backend.observe() == {"s": TenantState.LOADED}
        fake.dies_waking = False
        await backend.release("s", limit_ms=1_000)
        assert await backend.observe() == {"s": TenantState.UNLOADED}


async def test_one_that_says_it_is_awake_and_answers_no_call_fails_in_time_and_sleeps_again(tmp_path: Path) -> None:
    class Lies(fake_kinds.Vllm):
        lies = False

        async def _is_sleeping(self, _: web.Request) -> web.Response:
            return web.json_response({"is_sleeping": bool(self.away) and not self.lies})

        async def _wake(self, request: web.Request) -> web.Response:
            self.lies = True
            return web.Response()

        async def _sleep(self, request: web.Request) -> web.Response:
            self.lies = False
            return await super()._sleep(request)

    fake = Lies("m")
    http = ServerClient(fake.url, "vLLM", read_s=LIMITS.read_s)
    backend = OpenAiServer(
        http,
        tenant="s",
        models=["m"],
        control=AttachControl("s"),
        ours=False,
        engine=Vllm(http, 1, tmp_path),
        rests=True,
        limits=replace(LIMITS, answer_s=0.3),
    )
    async with running(fake, backend):
        await backend.release("s", limit_ms=1_000)
        with pytest.raises(BackendStalled, match="no progress in its first answer"):
            await backend.load("s")
        assert await backend.observe() == {"s": TenantState.UNLOADED}


async def test_what_could_not_be_started_in_time_is_not_left_on_its_way() -> None:
    fake = OpenAi("m")
    control = Starter(fake)
    control.fails = True
    backend = server(fake, control=control)
    with pytest.raises(BackendError, match="it cannot be started"):
        await backend.load("s")
    assert control.orders == ["ensure", "stop"]
    await backend.close()


@pytest.mark.parametrize("told", ["NaN", "soon", "+Inf"])
def test_what_is_no_count_tells_nothing(told: str) -> None:
    assert gauges(f"a 1.0\nb {told}", ("a", "b")) is None


async def test_with_a_call_in_flight_at_the_end_of_its_time_it_is_not_put_to_sleep(tmp_path: Path) -> None:
    fake = fake_kinds.Vllm("m")
    backend = vllm(fake, tmp_path)
    async with running(fake, backend):
        fake.begin("m")
        with pytest.raises(BackendError, match="at the server: 1"):
            await backend.release("s", limit_ms=2_000)
        assert (fake.dead, fake.posts()) == (False, [])


def test_gauges_are_summed_over_their_labels_and_others_of_a_longer_name_left_out() -> None:
    text = 'a{x="1"} 2.0\na{x="2"} 3.0\na_by_reason{x="1"} 50.0\n# a 9\nb 1.0\n'
    assert gauges(text, ("a", "b")) == 6
    assert gauges(text, ("a", "c")) is None


# ---- SGLang


async def test_without_the_memory_saver_nothing_is_released_that_would_free_nothing(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    fake.saver = False
    backend = sglang(fake, tmp_path)
    async with running(fake, backend):
        with pytest.raises(BackendRefused, match="without --enable-memory-saver"):
            await backend.release("s", limit_ms=60_000)
        assert fake.posts() == []


async def test_weights_that_would_be_lost_are_not_released_at_level_one_and_are_read_again_at_two(
    tmp_path: Path,
) -> None:
    fake = fake_kinds.Sglang("m")
    fake.backup = False
    one, two = sglang(fake, tmp_path), sglang(fake, tmp_path, level=2)
    async with running(fake, one, two):
        with pytest.raises(BackendRefused, match="--enable-weights-cpu-backup"):
            await one.release("s", limit_ms=60_000)
        await two.release("s", limit_ms=60_000)
        assert not fake.holding
        await two.load("s")
        assert fake.computed == ["m"]


async def test_what_rests_is_known_to_the_next_process_of_swapper(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    before, after = sglang(fake, tmp_path), sglang(fake, tmp_path)
    async with running(fake, before, after):
        await before.release("s", limit_ms=60_000)
        assert await after.observe() == {"s": TenantState.UNLOADED}
        await after.load("s")
        assert (fake.dead, fake.computed) == (False, ["m"])


async def test_a_server_that_was_started_anew_does_not_rest_and_is_not_told_to_resume(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    backend = sglang(fake, tmp_path)
    async with running(fake, backend):
        await backend.release("s", limit_ms=60_000)
        await fake.vanish()
        await fake.start()
        assert await backend.observe() == {"s": TenantState.LOADED}
        await backend.load("s")
        assert not fake.dead


async def test_one_that_was_started_anew_with_the_same_seed_is_told_by_nobody_having_listened(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    fake.fixed_seed = 42
    backend = sglang(fake, tmp_path)
    async with running(fake, backend):
        await backend.release("s", limit_ms=60_000)
        await fake.vanish()
        assert await backend.observe() == {"s": TenantState.STOPPED}
        await fake.start()
        assert await backend.observe() == {"s": TenantState.LOADED}
        await backend.load("s")
        assert not fake.dead


async def test_one_that_was_started_anew_with_the_same_seed_is_told_by_its_process(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    fake.fixed_seed = 42
    control = FakeControl(Phase.UP)
    control.seen = Seen(Phase.UP, run="container a")
    http = ServerClient(fake.url, "SGLang", read_s=LIMITS.read_s)
    backend = OpenAiServer(
        http,
        tenant="s",
        models=["m"],
        control=control,
        engine=Sglang(http, 1, tmp_path, lambda: backend.run()),
        rests=True,
        limits=LIMITS,
    )
    async with running(fake, backend):
        await backend.release("s", limit_ms=60_000)
        assert await backend.observe() == {"s": TenantState.UNLOADED}
        await fake.vanish()
        await fake.start()
        control.seen = Seen(Phase.UP, run="container b")
        assert await backend.observe() == {"s": TenantState.LOADED}
        await backend.load("s")
        assert not fake.dead


async def test_the_process_that_listens_at_the_address_tells_one_run_from_the_next(tmp_path: Path) -> None:
    fake = OpenAi("m")
    backend = server(fake)
    runs: list[str | None] = []
    for _ in range(2):
        argv = [sys.executable, "-m", "http.server", str(fake.port), "--bind", "127.0.0.1"]
        process = await asyncio.create_subprocess_exec(*argv, stdout=-3, stderr=-3)
        async for _ in backend.looks():
            if await backend.observe() == {"s": TenantState.LOADED} and backend.run() is not None:
                break
        runs.append(backend.run())
        process.kill()
        await process.wait()
        await backend.observe()
    assert None not in runs
    assert len(set(runs)) == 2
    await backend.close()


async def test_one_that_was_started_anew_behind_who_passes_on_to_it_is_told_by_its_seed(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    backend = server(fake, engine=lambda http: Sglang(http, 1, tmp_path, lambda: "pid 7 7"))
    async with running(fake, backend):
        await backend.release("s", limit_ms=60_000)
        assert await backend.observe() == {"s": TenantState.UNLOADED}
        await fake.vanish()
        await fake.start()
        assert await backend.observe() == {"s": TenantState.LOADED}
        await backend.load("s")
        assert not fake.dead


async def test_a_release_that_was_cut_off_is_not_followed_by_what_the_server_would_die_of(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    backend = sglang(fake, tmp_path)
    async with running(fake, backend):
        await backend.release("s", limit_ms=60_000)
        mark = tmp_path / "released.json"
        mark.write_text(mark.read_text().replace('"released"', '"resuming"'))
        assert await backend.observe() == {"s": TenantState.UNREACHABLE}
        with pytest.raises(BackendError, match="restart it"):
            await backend.load("s")
        assert not fake.dead


async def test_a_pause_is_taken_back_where_nothing_was_released(tmp_path: Path) -> None:
    fake = fake_kinds.Sglang("m")
    backend = sglang(fake, tmp_path)
    async with running(fake, backend):
        fake.stuck = True
        with pytest.raises(BackendRefused, match="did not do it"):
            await backend.release("s", limit_ms=60_000)
        assert not fake.paused


# ---- whose its processes are


async def test_who_listens_at_the_address_of_an_attached_server_is_it(tmp_path: Path) -> None:
    fake = OpenAi("m")
    backend = server(fake)
    async with running(fake, backend):
        assert backend.processes() == Owners()
        await backend.observe()
        assert backend.processes() == Owners({os.getpid(): "s"})


async def test_what_its_control_runs_is_the_servers() -> None:
    fake = OpenAi("m")
    control = FakeControl(Phase.UP)
    control.seen = Seen(Phase.UP, run="1", pids=(4711,), containers=("abc",))
    backend = server(fake, control=control)
    async with running(fake, backend):
        await backend.observe()
        assert backend.processes() == Owners({4711: "s"}, {"abc": "s"})
