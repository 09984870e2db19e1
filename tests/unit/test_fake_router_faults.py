"""The fake router's faults and lies: each strikes once here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.fake_faults import Fault, Kind, Verb
from tests.support.fake_wire import LOST, Dropped, NobodyThere
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
)


@pytest.mark.parametrize("after", [False, True])
@virtual
async def test_late_is_late_by_so_much_before_or_after_the_effect(tmp_path: Path, after: bool) -> None:
    async with running(tmp_path) as router:
        router.faults.set(Fault(Verb.LOAD, Kind.LATE, after=after, seconds=HOUR_S))
        asking = asyncio.create_task(post(router, "/models/load", model="alpha"))
        await asyncio.sleep(1)
        assert (await status(router))["value"] == ("loaded" if after else "unloaded")
        assert (await asking).status == 200
        assert now() == pytest.approx(HOUR_S)


@pytest.mark.parametrize("after", [False, True])
@virtual
async def test_an_error_may_come_instead_of_the_effect_or_instead_of_its_answer(tmp_path: Path, after: bool) -> None:
    async with running(tmp_path) as router:
        router.faults.set(Fault(Verb.LOAD, Kind.ERROR, after=after, status=502))
        assert (await post(router, "/models/load", model="alpha")).status == 502
        assert (await status(router))["value"] == ("loading" if after else "unloaded")


@virtual
async def test_who_hangs_for_good_never_answers_and_the_rest_does(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        router.faults.set(Fault(Verb.MODELS, Kind.HANG, times=None))
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(get(router, "/models"), HOUR_S)
        assert (await get(router, "/health")).status == 200
        router.faults.clear()
        assert (await get(router, "/models")).status == 200


@pytest.mark.parametrize("after", [False, True])
@virtual
async def test_a_connection_is_dropped_before_or_after_the_effect(tmp_path: Path, after: bool) -> None:
    async with running(tmp_path) as router:
        await load(router)
        await say(router, "abc", slot=0)
        router.faults.set(Fault(Verb.SAVE, Kind.DROP, after=after))
        with pytest.raises(Dropped):
            await act(router, "save")
        assert (tmp_path / "a.bin").exists() is after


@virtual
async def test_a_fault_strikes_its_own_model_as_often_as_was_said(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        fault = Fault(Verb.UNLOAD, Kind.ERROR, model="beta", times=2)
        router.faults.set(fault)
        answers = [(await post(router, "/models/unload", model=name)).status for name in ("alpha", *["beta"] * 3)]
        assert answers == [400, 503, 503, 400]
        assert router.faults.struck == [fault] * 2


@virtual
async def test_an_unload_that_lies_leaves_the_vram_held(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await load(router)
        router.faults.set(Fault(Verb.UNLOAD, Kind.VRAM_HELD))
        await unload(router)
        assert (await status(router))["value"] == "unloaded"
        assert router.vram.used_mib == ALPHA.vram_mib
        router.vram.free()
        assert router.vram.used_mib == 0


@virtual
async def test_a_restore_that_lies_is_read_again_from_the_beginning(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await load(router)
        await say(router, "a long story", slot=0)
        await act(router, "save")
        for fault, reused in (([Fault(Verb.RESTORE, Kind.NO_REUSE)], 0), ([], len("a long story"))):
            await unload(router)
            await load(router)
            router.faults.set(*fault)
            assert (await act(router, "restore")).json()["n_restored"] == 1 + len("a long story") + 4 - 1
            answer = await say(router, "a long story", slot=0)
            assert answer.json()["timings"]["cache_n"] == reused


@virtual
async def test_a_mute_model_is_loaded_and_answers_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        router.faults.set(Fault(Verb.LOAD, Kind.MUTE))
        assert await load(router) == "loaded"
        for asking in (say(router, "."), get(router, "/slots", model="alpha")):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asking, HOUR_S)
        await unload(router)
        assert (await status(router))["value"] == "unloaded"


@virtual
async def test_a_saved_file_may_be_shorter_than_was_said_and_then_ends_whoever_restores_it(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await load(router)
        await say(router, "abc", slot=0)
        router.faults.set(Fault(Verb.SAVE, Kind.SHORT_FILE, short=3))
        told = (await act(router, "save")).json()["n_written"]
        assert (tmp_path / "a.bin").stat().st_size == told - 3
        assert (await act(router, "restore")).status == 500
        assert (await status(router))["failed"]


@virtual
async def test_a_router_that_restarts_cuts_everything_and_its_children_outlive_it_for_a_moment(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await load(router)
        feed, stream = await events(router), await streamed(router)
        router.faults.set(Fault(Verb.MODELS, Kind.RESTARTS, seconds=1))
        with pytest.raises(Dropped):
            await get(router, "/models")
        for cut in (feed, stream):
            with pytest.raises(Dropped):
                await text_of(cut)
        with pytest.raises(NobodyThere):
            await get(router, "/models")
        await asyncio.sleep(1)
        assert (await status(router))["value"] == "unloaded"
        assert router.vram.used_mib == ALPHA.vram_mib
        await asyncio.sleep(router.pace.orphan_s)
        assert router.vram.used_mib == 0
        assert await load(router) == "loaded"


@pytest.mark.parametrize("verb", [Verb.SAVE, Verb.RESTORE, Verb.ANSWER, Verb.SLOTS])
@virtual
async def test_a_child_dies_in_the_midst_of_what_is_asked_of_it(tmp_path: Path, verb: Verb) -> None:
    async with running(tmp_path) as router:
        await load(router)
        await say(router, "abc", slot=0)
        whole = (await act(router, "save")).json()["n_written"]
        router.faults.set(Fault(verb, Kind.CHILD_DIES))
        match verb:
            case Verb.ANSWER:
                answer = await say(router, "abc")
            case Verb.SLOTS:
                answer = await get(router, "/slots", model="alpha")
            case _:
                answer = await act(router, verb.value)
        assert (answer.status, answer.body) == (500, LOST.encode())
        assert (await status(router))["exit_code"] == 1
        assert (tmp_path / "a.bin").stat().st_size == (whole // 2 if verb is Verb.SAVE else whole)


@virtual
async def test_a_child_may_die_while_it_loads(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        router.faults.set(Fault(Verb.LOAD, Kind.CHILD_DIES))
        assert await load(router) == "unloaded"
        assert (await status(router))["failed"]
        assert await load(router) == "loaded"


@virtual
async def test_a_stream_of_a_child_that_dies_ends_with_the_routers_words(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        await load(router)
        router.faults.set(Fault(Verb.ANSWER, Kind.CHILD_DIES))
        assert (await text_of(await streamed(router))).endswith(LOST.encode())


@virtual
async def test_a_deaf_event_stream_stands_and_tells_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as router:
        router.faults.set(Fault(Verb.EVENTS, Kind.DEAF))
        deaf = await events(router)
        await load(router)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(deaf), HOUR_S)
