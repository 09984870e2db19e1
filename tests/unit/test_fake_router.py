"""The fake router beyond the contract: each fault strikes once here, and what a real server does not show on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fake_child import Pace
from tests.support.fake_faults import Fault, Kind, Verb
from tests.support.fake_router import FakeRouter
from tests.support.fake_slots import Attention, FakeModel
from tests.support.fake_wire import LOST, NO_CONNECTION, Answer, Dropped, Json, NobodyThere, Stream
from tests.support.virtual_time import virtual

ALPHA, BETA = FakeModel("alpha", aliases=("first",)), FakeModel("beta")
HOUR_S = 3600.0


@asynccontextmanager
async def running(
    folder: Path, *models: FakeModel, models_max: int = 0, autoload: bool = False, pace: Pace | None = None
) -> AsyncGenerator[FakeRouter]:
    """A router, ended afterwards with nothing left of it."""
    router = FakeRouter(models or (ALPHA, BETA), slot_dir=folder, models_max=models_max, autoload=autoload, pace=pace)
    router.start()
    try:
        yield router
    finally:
        await router.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not router.vram.held


async def get(router: FakeRouter, path: str, **query: str) -> Answer:
    return await router.request("GET", path, query)


async def post(router: FakeRouter, path: str, *, port: str | None = None, action: str = "", **body: object) -> Answer:
    query = {"action": action} if action else {}
    return await router.request("POST", path, query, json.dumps(body).encode(), port=port)


async def status(router: FakeRouter, model: str = "alpha") -> Json:
    listed = (await get(router, "/models")).json()["data"]
    return next(one["status"] for one in listed if one["id"] == model)


async def events(router: FakeRouter) -> Stream:
    stream = (await get(router, "/models/sse")).body
    assert isinstance(stream, Stream)
    return stream


async def until(feed: Stream, model: str, *states: str) -> str:
    async for line in feed:
        event = json.loads(line.removeprefix(b"data: "))
        if event["model"] == model and event["data"]["status"] in states:
            await feed.aclose()
            return event["data"]["status"]
    raise AssertionError("the event stream ended")


async def load(router: FakeRouter, model: str = "alpha") -> str:
    feed = await events(router)
    assert (await post(router, "/models/load", model=model)).status == 200
    return await until(feed, model, "loaded", "unloaded")


async def unload(router: FakeRouter, model: str = "alpha") -> None:
    feed = await events(router)
    assert (await post(router, "/models/unload", model=model)).status == 200
    await until(feed, model, "unloaded")


async def say(router: FakeRouter, prompt: str, slot: int = -1) -> Answer:
    return await post(router, "/completion", model="alpha", prompt=prompt, n_predict=4, id_slot=slot)


async def text_of(stream: Stream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def act(router: FakeRouter, action: str, slot: int = 0, model: str = "alpha") -> Answer:
    return await post(router, f"/slots/{slot}", action=action, model=model, filename="a.bin")


async def streamed(router: FakeRouter, n: int = 50, port: str | None = None) -> Stream:
    body = (await post(router, "/completion", port=port, model="alpha", prompt="stream", n_predict=n, stream=True)).body
    assert isinstance(body, Stream)
    return body


def now() -> float:
    return asyncio.get_running_loop().time()


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
async def test_a_hybrid_restores_what_only_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, FakeModel("alpha", attention=Attention.HYBRID)) as router:
        await load(router)
        said = (await say(router, "a long story", slot=0)).json()["content"]
        saved = (await act(router, "save")).json()["n_saved"]
        for prompt, reused in (("a long story" + said + " and so on", saved), ("a long story!", 0)):
            await act(router, "restore")
            assert (await say(router, prompt, slot=0)).json()["timings"]["cache_n"] == reused


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
