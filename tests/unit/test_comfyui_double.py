"""The ComfyUI of the tests keeps to what was seen of the real one, the answers that promise too much among it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
import pytest

from tests.support.comfyprocess import ComfyProcess, Json, prompt, refused


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyProcess]:
    found = ComfyProcess(tmp_path_factory.mktemp("comfy"))
    yield found
    found.stop()


@pytest.fixture
def comfy(running: ComfyProcess) -> ComfyProcess:
    running.anew()
    running.tell(hold=True)
    return running


def posted(comfy: ComfyProcess, count: int, **outside: Any) -> list[str]:  # noqa: ANN401
    """The ids of so many prompts, the first of them running."""
    ids = [str(comfy.post("/prompt", prompt(seed=seed, **outside))["prompt_id"]) for seed in range(count)]
    comfy.until(lambda state: state["running"] == ids[:1])
    return ids


def test_the_queue_tells_what_runs_and_what_waits_under_both_prefixes(comfy: ComfyProcess) -> None:
    ids = posted(comfy, 3, client_id="me", extra_data={"a": 1})
    told = comfy.get("/queue")
    assert told == comfy.get("/api/queue")
    assert comfy.get("/prompt") == {"exec_info": {"queue_remaining": 3}}
    number, prompt_id, nodes, extra, outputs = told["queue_running"][0]
    assert (number, prompt_id, nodes, extra) == (0, ids[0], prompt()["prompt"], {"a": 1, "client_id": "me"})
    assert outputs == ["3"]
    assert {item[1] for item in told["queue_pending"]} == set(ids[1:])


def test_free_is_answered_at_once_and_done_after_the_prompt_that_runs_and_before_the_next(comfy: ComfyProcess) -> None:
    ids = posted(comfy, 2)
    assert comfy.post("/free", {"unload_models": True, "free_memory": True}) == {}
    assert comfy.state()["mib"] > 12_000
    comfy.tell(free_s=30)
    comfy.tick(3)
    comfy.until(lambda state: state["done"] == ids[:1] and not state["running"])
    assert comfy.state()["pending"] == ids[1:], "the next one waits for what is being freed"
    assert comfy.post("/free", {}) == {}
    assert refused_text(comfy, "/free", b"") == 500


def refused_text(comfy: ComfyProcess, path: str, raw: bytes) -> int:
    with pytest.raises(HTTPError) as error:
        urlopen(Request(comfy.url + path, raw, method="POST"), timeout=10)
    error.value.close()
    return error.value.code


def test_an_interrupt_ends_what_runs_at_its_next_step_and_the_rest_goes_on(comfy: ComfyProcess) -> None:
    ids = posted(comfy, 2)
    comfy.tell(lose_interrupts=1)
    comfy.post("/interrupt", {})  # lost, and answered alike
    comfy.post("/interrupt", {"prompt_id": ids[1]})  # it does not run
    comfy.tick()
    comfy.post("/interrupt", {})
    comfy.tick(4)
    comfy.until(lambda state: state["done"] == ids[1:])
    status = comfy.get(f"/history/{ids[0]}")[ids[0]]["status"]
    assert (status["status_str"], status["completed"]) == ("error", False)
    assert comfy.get(f"/history/{ids[0]}")[ids[0]]["outputs"] == {}


def test_what_is_taken_out_leaves_no_trace_and_comes_back_under_its_id_and_number(comfy: ComfyProcess) -> None:
    ids = posted(comfy, 4)
    items = {item[1]: item for item in comfy.get("/queue")["queue_pending"]}
    comfy.post("/queue", {"delete": [ids[1], ids[2], "no such"]})
    assert comfy.get(f"/history/{ids[1]}") == {}
    for one in (ids[2], ids[1]):
        again: Json = {"prompt": items[one][2], "prompt_id": one, "number": items[one][0], "extra_data": items[one][3]}
        assert comfy.post("/prompt", again)["prompt_id"] == one
    assert comfy.state()["pending"] == ids[1:]
    comfy.post("/queue", {"clear": True})
    assert (comfy.state()["pending"], comfy.state()["running"]) == ([], ids[:1])


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "no_prompt"),
        ({"prompt": {"1": {"class_type": "Nothing", "inputs": {}}}}, "invalid_prompt"),
        ({"prompt": {"1": {"class_type": "EmptyImage", "inputs": {}}}}, "prompt_no_outputs"),
        (
            {"prompt": {**prompt()["prompt"], "9": {"class_type": "LoadImage", "inputs": {}}}},
            "prompt_outputs_failed_validation",
        ),
    ],
)
def test_what_it_does_not_take_is_a_400_in_its_own_shape(comfy: ComfyProcess, body: Json, kind: str) -> None:
    status, told = refused(comfy.url + "/prompt", body)
    assert (status, told["error"]["type"], sorted(told)) == (400, kind, ["error", "node_errors"])
    assert refused_text(comfy, "/prompt", b"no json") == 500


async def test_its_words_go_to_everybody_or_to_whose_prompt_it_is_and_end_in_order(comfy: ComfyProcess) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{comfy.url}/ws?clientId=me") as mine,
        session.ws_connect(f"{comfy.url}/ws?clientId=other") as other,
    ):
        assert (await mine.receive_json(timeout=10))["data"]["sid"] == "me"
        await other.receive_json(timeout=10)
        comfy.tell(hold=False)
        async with session.post(f"{comfy.url}/prompt", json=prompt(client_id="me")) as answer:
            assert answer.status == 200
        heard, beside = await until_the_end(mine), await until_the_queue_is_empty(other)
    assert heard[-3:] == ["execution_success", "status 0", "executing None"]
    assert set(beside) == {"status 1", "status 0"}


async def test_who_comes_with_the_id_of_another_takes_its_words(comfy: ComfyProcess) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{comfy.url}/ws?clientId=me") as first,
        session.ws_connect(f"{comfy.url}/ws?clientId=me") as second,
    ):
        assert (await first.receive_json(timeout=10))["type"] == "status"
        assert (await second.receive_json(timeout=10))["type"] == "status"
        async with session.post(f"{comfy.url}/queue", json={"clear": True}) as answer:
            assert answer.status == 200
        assert (await second.receive_json(timeout=10))["type"] == "status"
        with pytest.raises(TimeoutError):
            await first.receive(timeout=0.1)


async def until_the_end(socket: aiohttp.ClientWebSocketResponse) -> list[str]:
    """What is told up to the end of a prompt."""
    heard: list[str] = []
    while not heard or heard[-1] != "executing None":
        heard += words(await socket.receive(timeout=10))
    return heard


async def until_the_queue_is_empty(socket: aiohttp.ClientWebSocketResponse) -> list[str]:
    heard: list[str] = []
    while "status 0" not in heard:
        heard += words(await socket.receive(timeout=10))
    return heard


def words(message: aiohttp.WSMessage) -> list[str]:
    if message.type is not aiohttp.WSMsgType.TEXT:
        return []
    told = cast("Json", json.loads(cast("str", message.data)))
    match told["type"]:
        case "status":
            return [f"status {told['data']['status']['exec_info']['queue_remaining']}"]
        case "executing":
            return [f"executing {told['data']['node']}"]
        case other:
            return [str(other)]
