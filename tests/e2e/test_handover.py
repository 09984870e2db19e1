"""The card changes hands on a real llama-server: what is kept, and what is said when something cannot be."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import psutil
import pytest

from swapper.demo.models import make_models
from tests.support.router import RealRouter
from tests.support.server import Json, Server

STORY = "once upon a time there was a card that changed hands; " * 12
SERVING = {"alpha": "{vram: 8GiB, default: true}"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = make_models(folder, ["alpha", "beta"])
    made["broken"] = folder / "broken.gguf"
    made["broken"].write_bytes(made["beta"].read_bytes()[:100_000])
    return made


@pytest.fixture
def router(tmp_path: Path, models: dict[str, Path]) -> Iterator[RealRouter]:
    router = RealRouter(tmp_path / "router", models)
    yield router
    router.stop()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def serve(router: RealRouter, models: dict[str, str], *, start: bool = True, **options: object) -> Server:
        server = Server(tmp_path / "swapper", router, models, **options)  # pyright: ignore[reportArgumentType]
        started.append(server)
        if start:
            router.start()
        server.start()
        return server

    yield serve
    for server in started:
        server.stop()


def refused(call: Callable[[], Json]) -> tuple[int, str]:
    """Status and message of a call that must fail."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        call()
    body = cast("Json", json.loads(caught.value.read()))
    error = cast("Json", body.get("error") or {"message": body.get("detail")})
    return caught.value.code, str(error["message"])


def cache_n(answer: Json) -> int:
    return cast("dict[str, int]", answer["timings"])["cache_n"]


def items(body: Json, name: str) -> list[Json]:
    return cast("list[Json]", body[name])


def talks(swap: Json) -> list[Json]:
    return cast("list[Json]", swap["conversations"])


async def test_swapper_starts_its_router_and_leaves_it_and_its_conversations_alone_when_it_stops(
    router: RealRouter, serve: Callable[..., Server]
) -> None:
    server = serve(router, SERVING, start=False, owned=True)
    try:
        first = server.chat("alpha", STORY)
        record = json.loads((server.state_dir / "servers" / "llama" / "record.json").read_text())
        assert server.stop() == 0
        assert psutil.pid_exists(record["pid"])
        server.start()
        text = cast("list[dict[str, dict[str, str]]]", first["choices"])[0]["message"]["content"]
        assert cache_n(server.chat("alpha", STORY, text, "and then?")) > len(STORY)
        assert json.loads((server.state_dir / "servers" / "llama" / "record.json").read_text()) == record
    finally:
        server.stop()
        await server.stop_router()


def test_a_call_that_arrives_while_the_card_is_held_is_answered_afterwards(
    router: RealRouter, serve: Callable[..., Server]
) -> None:
    server = serve(router, SERVING)
    server.chat("alpha", STORY)
    lease = server.lease("job", wait=30)
    assert lease["state"] == "granted"
    with ThreadPoolExecutor(1) as client:
        call = client.submit(server.chat, "alpha", STORY)
        waiting = server.until(lambda status: [one for one in items(status, "demand") if one["waiting"]])
        assert [(one["tenant"], one["waiting"], one["running"]) for one in waiting] == [("llama/alpha", 1, 0)]
        assert "job" in str(waiting[0]["explain"])
        assert not call.done()
        assert server.get(f"/api/leases/{lease['id']}")["state"] == "granted", "the call takes nothing from the lease"
        server.release(lease)
        assert cache_n(call.result(30)) >= len(STORY)


def test_a_slot_folder_that_is_not_the_servers_is_said_and_the_conversation_is_stated_cold(
    router: RealRouter, serve: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    server = serve(router, SERVING, slot_dir=tmp_path / "elsewhere")
    server.chat("alpha", STORY)
    assert server.lease("job", wait=30)["state"] == "granted"
    (lost,) = [talk for talk in talks(server.swaps()[0]) if not talk["saved"]]
    assert lost["result"] == "cold"
    assert str(tmp_path / "elsewhere") in str(lost["reason"])
    assert str(router.slot_dir) in str(lost["reason"])


def test_with_required_snapshots_a_save_that_fails_unloads_nothing(
    router: RealRouter, serve: Callable[..., Server], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    server = serve(router, SERVING, slot_dir=tmp_path / "elsewhere", snapshots="{required: true}")
    server.chat("alpha", STORY)
    lease = server.lease("job", wait=30)
    assert lease["state"] == "failed"
    assert "could not be saved" in str(lease["reason"])
    assert cache_n(server.chat("alpha", STORY)) >= len(STORY), "the conversation is where it was"
    (swap,) = server.until(lambda _: [swap for swap in server.swaps()[:1] if swap["outcome"]])
    assert swap["outcome"] == "compensated"


async def test_a_damaged_model_answers_with_the_servers_own_words_and_the_queue_goes_on(
    router: RealRouter, serve: Callable[..., Server]
) -> None:
    traits = "{vram: 20GiB}"
    server = serve(router, {**SERVING, "broken": traits, "beta": traits}, start=False, owned=True)
    try:
        server.chat("alpha", STORY)
        status, message = refused(lambda: server.chat("broken", "hello"))
        assert status == 502
        assert "is not within the file bounds" in message
        assert f"(log: {server.state_dir / 'servers' / 'llama' / 'log'}, " in message
        status_page = server.get("/api/status")
        (failure,) = [one["failure"] for one in items(status_page, "tenants") if one["id"] == "llama/broken"]
        assert failure, "the status says why, too"
        assert str(failure) in message
        (card,) = items(status_page, "cards")
        assert cast("dict[str, Json]", card["failed"])["llama/broken"]["reason"] == failure
        assert server.chat("beta", "hello")["choices"]
        assert server.lease("job", wait=30)["state"] == "granted"
    finally:
        server.stop()
        await server.stop_router()


def test_a_model_the_server_does_not_have_is_said_and_others_are_served(
    router: RealRouter, serve: Callable[..., Server]
) -> None:
    server = serve(router, {**SERVING, "ghost": "{vram: 1GiB}"})
    status, message = refused(lambda: server.chat("ghost", "hello"))
    assert (status, "no model 'ghost'" in message) == (502, True), message
    assert server.chat("alpha", "hello")["choices"]


def test_an_unknown_name_is_404_with_the_nearest_one(router: RealRouter, serve: Callable[..., Server]) -> None:
    server = serve(router, SERVING)
    status, message = refused(lambda: server.chat("alhpa", "hello"))
    assert (status, "alpha" in message) == (404, True)


def test_wrong_tokens_and_ended_leases_are_told_apart(router: RealRouter, serve: Callable[..., Server]) -> None:
    server = serve(router, SERVING)
    lease = server.lease("job", wait=30)
    token = cast("int", lease["token"])
    beat = f"/api/leases/{lease['id']}/heartbeat"
    assert server.post(beat, {"token": token})["state"] == "granted"
    assert refused(lambda: server.post(beat, {"token": token + 1}))[0] == 409
    assert refused(lambda: server.delete(f"/api/leases/{lease['id']}?token={token + 1}"))[0] == 409
    server.release(lease)
    assert refused(lambda: server.post(beat, {"token": token}))[0] == 410
    assert server.delete(f"/api/leases/{lease['id']}?token={token}")["state"] == "released"


@pytest.mark.parametrize("victim", ["router", "child"])
async def test_after_a_kill_9_of_the_server_its_resident_comes_back_without_an_operator(
    router: RealRouter, serve: Callable[..., Server], victim: str
) -> None:
    server = serve(router, SERVING, start=False, owned=True)
    try:
        server.chat("alpha", STORY)
        record = json.loads((server.state_dir / "servers" / "llama" / "record.json").read_text())
        process = psutil.Process(record["pid"])
        if victim == "child":
            process = process.children(recursive=True)[0]
        process.kill()
        seen = server.next_swap(lambda swap: (swap["outcome"], swap["cause"]) == ("done", "recovery"))
        assert seen["to"] == ["llama/alpha"]
        assert server.chat("alpha", "hello again")["choices"]
    finally:
        server.stop()
        await server.stop_router()
