"""The fake router beyond the contract: what a real server does, too, and does not show on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fake_child import Pace
from tests.support.fake_slots import Attention, FakeModel
from tests.support.fake_wire import LOST, NO_CONNECTION, Dropped, NobodyThere
from tests.support.virtual_time import virtual
from tests.unit.fake_router_talk import (
    ALPHA,
    HOUR_S,
    act,
    events,
    get,
    load,
    now,
    post,
    running,
    say,
    status,
    streamed,
    text_of,
    unload,
    until,
)


@virtual
async def test_vram_is_held_from_the_beginning_of_a_load_to_the_end_of_the_child(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await post(router, "/models/load", model="alpha")
        assert router.vram.used_mib == ALPHA.vram_mib
        await asyncio.sleep(1)
        stream = await streamed(router, 4000)
        await post(router, "/models/unload", model="alpha")
        await asyncio.sleep(ALPHA.stop_timeout_s - 1)
        assert router.vram.used_mib == ALPHA.vram_mib
        assert (await text_of(stream)).endswith(LOST.encode())
        assert router.vram.used_mib == 0


@virtual
async def test_a_hybrid_restores_what_only_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, FakeModel("alpha", attention=Attention.HYBRID)) as router:
        await load(router)
        said = (await say(router, "a long story", slot=0)).json()["content"]
        saved = (await act(router, "save")).json()["n_saved"]
        for prompt, reused in (("a long story" + said + " and so on", saved), ("a long story!", 0)):
            await act(router, "restore")
            assert (await say(router, prompt, slot=0)).json()["timings"]["cache_n"] == reused


@virtual
async def test_with_a_limit_the_idle_one_gives_way_and_the_busy_one_does_not(tmp_path: Path) -> None:
    async with running(tmp_path, models_max=1) as router:
        await load(router)
        async for _ in await streamed(router, 4000):
            answer = await post(router, "/models/load", model="beta")
            assert (answer.status, "limit reached" in str(answer.json())) == (500, True)
            break
        await unload(router)
        await load(router)
        assert await load(router, "beta") == "loaded"
        assert (await status(router))["value"] == "unloaded"


@virtual
async def test_what_loads_on_startup_is_there_without_being_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path, FakeModel("alpha", load_on_startup=True), models_max=1) as router:
        await until(await events(router), "alpha", "loaded")


@virtual
async def test_a_model_that_still_loads_cannot_be_reached(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await post(router, "/models/load", model="alpha")
        assert (await get(router, "/slots", model="alpha")).body == NO_CONNECTION.encode()


@virtual
async def test_an_alias_is_as_good_as_the_name(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        assert (await post(router, "/models/load", model="first")).status == 200
        await until(await events(router), "alpha", "loaded")
        assert (await get(router, "/slots", model="first")).status == 200


@pytest.mark.parametrize(("asked", "state"), [({}, "loaded"), ({"autoload": "false"}, "unloaded")])
@virtual
async def test_with_autoload_on_whoever_only_looks_loads(tmp_path: Path, asked: dict[str, str], state: str) -> None:
    async with running(tmp_path, autoload=True) as router:
        await get(router, "/slots", model="alpha", **asked)
        assert (await status(router))["value"] == state


@virtual
async def test_a_sleeper_holds_less_and_whoever_looks_at_its_slots_wakes_it_empty(tmp_path: Path) -> None:
    async with running(tmp_path, FakeModel("alpha", sleep_idle_s=HOUR_S)) as router:
        await load(router)
        await say(router, "abc", slot=0)
        await until(await events(router), "alpha", "sleeping")
        assert now() == pytest.approx(HOUR_S, abs=1)
        assert router.vram.used_mib == ALPHA.asleep_mib
        assert [set(slot) for slot in (await get(router, "/slots", model="alpha")).json()] == [
            {"id", "n_ctx", "speculative", "is_processing"}
        ] * 2
        assert router.vram.used_mib == ALPHA.vram_mib


@virtual
async def test_the_counters_tell_of_those_that_wait_for_a_slot(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await load(router)
        running_, waiting = [await streamed(router, 4000) for _ in range(2)], asyncio.create_task(say(router, "abc"))
        await asyncio.sleep(0.1)
        text = (await get(router, "/metrics", model="alpha")).body
        assert isinstance(text, bytes)
        assert b"requests_processing 2" in text
        assert b"requests_deferred 1" in text
        await running_[0].aclose()
        assert (await waiting).status == 200


@pytest.mark.parametrize("direct", [False, True])
@virtual
async def test_only_a_child_hears_that_the_client_of_a_plain_call_left(tmp_path: Path, direct: bool) -> None:
    async with running(tmp_path) as router:
        await load(router)
        child = router.child("alpha")
        assert child is not None
        call = post(
            router, "/completion", port=child.port if direct else None, model="alpha", prompt="a", n_predict=1000
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.1)
        await asyncio.sleep(0.1)
        assert child.processing == (0 if direct else 1)
        await asyncio.sleep(HOUR_S)
        assert (len(child.slots[1].tokens) == 1000 + 1) is not direct


@virtual
async def test_a_router_hears_it_once_it_streams(tmp_path: Path) -> None:
    async with running(tmp_path, pace=Pace(prompt_token_s=1)) as router:
        await load(router)
        child = router.child("alpha")
        assert child is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(streamed(router), 3)
        assert child.processing == 1
        await asyncio.sleep(5)
        assert child.processing == 0
        assert len(child.slots[1].tokens) < 50


@virtual
async def test_a_child_answers_without_its_router_until_it_follows_it(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await load(router)
        child = router.child("alpha")
        assert child is not None
        router.die()
        assert (await router.request("GET", "/props", port=child.port)).json()["model_alias"] == "alpha"
        with pytest.raises(Dropped):
            await text_of(await streamed(router, 4000, child.port))
        with pytest.raises(NobodyThere):
            await router.request("GET", "/props", port=child.port)


@virtual
async def test_a_thousand_handovers_leave_nothing_behind(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        tasks = len(asyncio.all_tasks())
        for _ in range(1000):
            await load(router)
            await say(router, "abc", slot=0)
            await act(router, "save")
            await unload(router)
        await asyncio.sleep(1)
        assert (len(asyncio.all_tasks()), router.vram.held) == (tasks, {})
