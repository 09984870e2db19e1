"""A ComfyUI behind its gate beside chats on a real llama-server: its prompts have the card, and the chats come back."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import cast
from urllib.error import HTTPError

import pytest

from tests.support.comfyprocess import Json, prompt
from tests.support.comfyserve import RESIDENT, ComfyServe, comfy_serving
from tests.support.matrix import STORY, back, cache_n
from tests.support.nvml import FakeNvml, Gpu, Process

QUESTIONS = ("and then?", "and whose was it?", "who said so?")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[ComfyServe]:
    with comfy_serving(ComfyServe(tmp_path)) as server:
        yield server


def numbers(calls: list[Future[Json]]) -> dict[float, str]:
    return {float(call.result(60)["number"]): str(call.result()["prompt_id"]) for call in calls}


def moves(server: ComfyServe) -> list[tuple[list[str], list[str]]]:
    """Who left and who came, the oldest swap first."""
    swaps = reversed(server.swaps())
    found = [(cast("list[str]", swap["from"]), cast("list[str]", swap["to"])) for swap in swaps]
    return [move for move in found if move != ([], [RESIDENT])]  # its first load


OUT_AND_BACK = [([RESIDENT], ["comfyui"]), (["comfyui"], [RESIDENT])]


def leases(server: ComfyServe) -> list[Json]:
    return cast("list[Json]", server.get("/api/leases")["items"])


def test_ten_prompts_of_two_clients_during_chats_cost_one_handover_and_the_conversation_comes_back_warm(
    serve: ComfyServe,
) -> None:
    server, comfy = serve, serve.comfy
    said = server.chat("alpha", STORY)
    text = cast("list[dict[str, dict[str, str]]]", said["choices"])[0]["message"]["content"]
    first = server.prompt(prompt(client_id="a", steps=2))
    told = first.result(60)
    chats = [server.clients.submit(server.chat, "alpha", STORY, text, question) for question in QUESTIONS]
    calls = [server.prompt(prompt(seed=seed, client_id="ab"[seed % 2])) for seed in range(9)]
    state = comfy.until(lambda state: len(state["done"]) == 10, limit_s=60)
    ids = numbers([first, *calls])
    assert state["done"] == [ids[number] for number in sorted(ids)], "in the order of their numbers"
    assert sorted(ids) == list(range(10))
    assert ids[0] == told["prompt_id"]
    (lease,) = leases(server)
    assert (lease["holder"], lease["owner"], lease["label"]) == ("comfyui", "local", "comfyui: 1 prompt")
    assert [chat.result(60)["choices"] for chat in chats], "no chat is lost"
    assert max(cache_n(chat.result()) for chat in chats) > len(STORY), "it came back as it was"
    back(server, RESIDENT)
    assert moves(server) == OUT_AND_BACK
    (lease,) = leases(server)
    assert lease["state"] == "released"
    assert comfy.vram_mib() < 1024


def test_a_comfyui_that_is_killed_in_its_lease_is_started_again_and_its_prompts_are_not_lost(
    serve: ComfyServe,
) -> None:
    server, comfy = serve, serve.comfy
    comfy.from_the_start(hold=True)
    calls = [server.prompt(prompt(seed=seed)) for seed in range(3)]
    ids = numbers(calls)
    before = comfy.pid
    comfy.until(lambda state: state["running"])
    comfy.kill()
    comfy.from_the_start()
    late = server.prompt(prompt(seed=9))
    done = [*(ids[number] for number in sorted(ids)), str(late.result(60)["prompt_id"])]

    def all_done(status: Json) -> list[Json]:
        del status
        try:
            return [{}] if comfy.state()["done"] == done else []
        except OSError:
            return []

    server.until(all_done, limit_s=60)
    assert comfy.pid != before
    back(server, RESIDENT)
    (lease,) = leases(server)
    assert lease["state"] == "released"


def test_swapper_killed_with_prompts_running_and_pending_takes_its_lease_over(serve: ComfyServe) -> None:
    server, comfy = serve, serve.comfy
    comfy.from_the_start(hold=True)
    ids = numbers([server.prompt(prompt(seed=seed)) for seed in range(3)])
    comfy.until(lambda state: state["running"])
    (card,) = cast("list[Json]", server.get("/api/status")["cards"])
    assert [(hold["tenant"], hold["granted"]) for hold in card["holds"]] == [("comfyui", True)]
    waits = server.clients.submit(server.chat, "alpha", STORY)
    server.until(lambda status: [one for one in cast("list[Json]", status["demand"]) if one["waiting"]])
    server.kill()
    with pytest.raises(OSError):  # noqa: PT011  the client of the process that was killed
        waits.result(60)
    server.start()
    late = server.prompt(prompt(seed=9))
    ids |= numbers([late])
    comfy.tell(hold=False)
    state = comfy.until(lambda state: len(state["done"]) == 4, limit_s=60)
    assert state["done"] == [ids[number] for number in sorted(ids)]
    back(server, RESIDENT)
    (lease,) = leases(server)
    assert lease["state"] == "released", "one lease, across the kill"
    assert moves(server) == OUT_AND_BACK
    assert server.chat("alpha", STORY)["choices"]


def test_prompts_taken_out_at_max_hold_come_back_in_a_lease_of_their_own_also_after_a_kill(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = ComfyServe(tmp_path)
        server.add("policy: {max_hold: 2s, grace: 1s, drain: {interactive: 2s, normal: 2s, batch: 2s}}")
        stack.enter_context(comfy_serving(server))
        comfy = server.comfy
        comfy.from_the_start(hold=True)
        ids = numbers([server.prompt(prompt(seed=seed)) for seed in range(3)])
        kept = server.state_dir / "comfyui" / "comfyui.json"
        server.until(lambda _: [{}] if kept.exists() else [])
        server.kill()
        assert comfy.state()["running"] == [ids[0]]
        comfy.from_the_start()
        comfy.tell(hold=False)
        server.start()
        state = comfy.until(lambda state: len(state["done"]) == 3, limit_s=60)
        assert state["done"] == [ids[number] for number in sorted(ids)]
        server.until(lambda _: [{}] if not kept.exists() else [])
        back(server, RESIDENT)
        assert {lease["state"] for lease in leases(server)} == {"revoked", "released"}


def test_a_prompt_that_is_longer_than_its_lease_is_interrupted_and_the_chats_come_back(tmp_path: Path) -> None:
    server = ComfyServe(tmp_path)
    server.add("policy: {max_hold: 1s, grace: 1s, drain: {interactive: 1s, normal: 1s, batch: 1s}}")
    with comfy_serving(server):
        comfy = server.comfy
        comfy.from_the_start(hold=False, step_s=0.2, lose_interrupts=1)
        told = server.prompt(prompt(steps=1000)).result(60)
        back(server, RESIDENT)
        record = comfy.get(f"/history/{told['prompt_id']}")[str(told["prompt_id"])]
        assert record["status"]["status_str"] == "error"
        assert comfy.vram_mib() < 1024
        assert server.chat("alpha", STORY)["choices"]


@contextmanager
def driver_tells(server: ComfyServe, nvml: FakeNvml) -> Generator[None]:
    """The driver says what the ComfyUI of the moment has."""
    over = Event()

    def tell() -> None:
        while not over.wait(0.02):
            try:
                pid, mib = server.comfy.pid, server.comfy.vram_mib()
            except FileNotFoundError:
                continue
            (gpu,) = nvml.gpus
            gpu.used_mib, gpu.processes = mib, [Process(pid, mib)] if mib else []
            nvml.tell()

    teller = Thread(target=tell)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def test_vram_that_free_leaves_is_taken_back_by_a_restart_before_the_chats_come_back(tmp_path: Path) -> None:
    server = ComfyServe(tmp_path, card="{probe: nvml, reserve: 1GiB}")
    nvml = FakeNvml(tmp_path, Gpu("GPU-1b0c", total_mib=24_576))
    server.env = nvml.env
    with comfy_serving(server), driver_tells(server, nvml):
        comfy = server.comfy
        comfy.from_the_start(keeps_mib=9_000)
        server.prompt(prompt()).result(60)
        comfy.until(lambda state: state["done"])
        comfy.from_the_start()
        back(server, RESIDENT)
        swap = next(one for one in server.swaps() if one["from"] == ["comfyui"])
        steps = {one["step"]: one for one in cast("list[Json]", swap["steps"])}
        assert steps["release"]["detail"] == "comfyui kept 9000 MiB of VRAM after /free: restarted"
        assert (swap["outcome"], steps["vacate"]["outcome"]) == ("done", "done")


def test_a_comfyui_that_cannot_be_started_is_told_to_who_waits_and_the_chats_come_back(tmp_path: Path) -> None:
    server = ComfyServe(tmp_path)
    server.config.write_text(server.config.read_text().replace('"tests.support.comfyui"', '"no.such.module"'))
    with comfy_serving(server):
        server.chat("alpha", STORY)
        call = server.prompt(prompt())
        with pytest.raises(HTTPError) as refused:
            call.result(60)
        told = cast("Json", json.loads(refused.value.read()))
        refused.value.close()
        assert refused.value.code == 503
        assert "No module named" in told["error"]["message"]
        back(server, RESIDENT)
        assert cache_n(server.chat("alpha", STORY)) >= len(STORY)
