"""What llama-server's router really does: loading, unloading, its events and its counters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.conftest import Router
from tests.contract.talk import Json, Talk, until
from workers.llama.child import find_child
from workers.llama.router import LlamaRouter


async def test_the_events_of_a_load_and_an_unload_come_in_order(talk: Talk) -> None:
    await talk.unload("alpha")
    async with talk.events() as events:
        assert await talk.post("/models/load", {"model": "alpha"}) == (200, {"success": True})
        seen = [event async for event in _take(events, "alpha", "loaded")]
        assert seen[0] == {"model": "alpha", "event": "model_status", "data": {"status": "loading"}}
        progress = [event["data"]["progress"]["value"] for event in seen[1:-1]]
        assert (progress[0], progress[-1]) == (0.0, 1.0)
        assert seen[-1]["data"]["info"]["meta"]["n_ctx"] == 4096  # of one slot
        await talk.say("alpha", "a", n=1)  # an unload in its first milliseconds can go unheard, until it is forced
        assert await talk.post("/models/unload", {"model": "alpha"}) == (200, {"success": True})
        assert await until(events, "alpha", "unloaded") == {"status": "unloaded", "exit_code": 0}


async def test_a_running_model_names_the_port_of_its_child_and_the_child_is_gone_once_it_is_unloaded(
    real_talk: Talk,
) -> None:
    await real_talk.reload("alpha")
    args = (await real_talk.model("alpha"))["status"]["args"]
    child = find_child("alpha", args[args.index("--port") + 1])
    assert child is not None
    await real_talk.unload("alpha")
    assert not child.alive()


async def test_loading_twice_or_a_stranger_is_refused(talk: Talk) -> None:
    await talk.load("alpha")
    status, answer = await talk.post("/models/load", {"model": "alpha"})
    assert (status, answer["error"]["message"]) == (400, "model is already running")
    assert (await talk.post("/models/load", {"model": "nobody"}))[0] == 404


async def test_unloading_what_does_not_run_is_refused(talk: Talk) -> None:
    await talk.unload("beta")
    status, answer = await talk.post("/models/unload", {"model": "beta"})
    assert (status, answer["error"]["message"]) == (400, "model is not running")


async def test_a_damaged_model_fails_with_exit_code_1_and_no_reason(talk: Talk) -> None:
    assert await talk.load("broken") == {"status": "unloaded", "exit_code": 1}
    status = (await talk.model("broken"))["status"]
    assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 1)


async def test_with_autoload_off_an_unloaded_model_stays_unloaded_whatever_is_asked(talk: Talk) -> None:
    await talk.unload("beta")
    for path in ("/slots", "/metrics", "/props"):
        status, answer = await talk.get(path, model="beta", autoload="false")
        assert (status, answer["error"]["message"]) == (400, "model is not loaded")
    assert await talk.status("beta") == "unloaded"


async def test_the_counters_show_what_runs_and_what_waits(talk: Talk) -> None:
    await talk.reload("alpha")
    _, text = await talk.get("/metrics", model="alpha")
    assert "llamacpp:requests_processing 0" in text
    async with talk.streaming("alpha", 3000):
        _, text = await talk.get("/metrics", model="alpha")
        assert "llamacpp:requests_processing 1" in text
        assert "llamacpp:requests_deferred 0" in text


async def test_without_the_flag_there_are_no_counters(bare: Talk) -> None:
    await bare.load("alpha")
    assert (await bare.get("/metrics", model="alpha"))[0] == 501


async def test_an_unload_with_a_call_in_flight_mostly_ends_by_force_and_then_looks_like_a_failure(talk: Talk) -> None:
    """Seen on b10434: now and then the child gets out of the call in time and ends cleanly; both must be understood."""
    await talk.reload("hasty")
    async with talk.streaming("hasty", 3900) as stream:
        ended = await talk.unload("hasty")
        assert (await stream.read()).decode()
    assert ended in ({"status": "unloaded", "exit_code": 1}, {"status": "unloaded", "exit_code": 0})
    assert bool((await talk.model("hasty"))["status"].get("failed")) is (ended["exit_code"] == 1)


async def test_an_unload_after_a_closed_call_was_given_up_is_clean(talk: Talk, backend: LlamaRouter) -> None:
    await talk.reload("hasty")
    async with talk.streaming("hasty", 3900) as stream:
        stream.close()
        await backend.quiesce("llama/hasty")  # one that comes before the server has seen it mostly ends by force
        assert await talk.unload("hasty") == {"status": "unloaded", "exit_code": 0}


def test_load_on_startup_and_no_models_limit_together_keep_the_router_from_starting(
    another: type[Router], tmp_path: Path, models: dict[str, Path]
) -> None:
    eager = {"alpha": {"load-on-startup": "true"}}
    router = another(tmp_path, {"alpha": models["alpha"]}, overrides=eager)
    with pytest.raises(RuntimeError, match=r"models to load on startup \(1\) exceeds models_max \(0\)"):
        router.start()
    assert not router.alive


async def _take(events: AsyncIterator[Json], model: str, last: str) -> AsyncIterator[Json]:
    async for event in events:
        if event["model"] == model:
            yield event
            if event["data"]["status"] == last:
                return
