"""The gate before a ComfyUI: prompts wait for the lease, which lasts while they do, and outlive one that ended."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper.core.types import LeaseState, WorkClass
from tests.support.comfyprocess import ComfyProcess, prompt
from tests.unit.comfyui_gate import ME, Json, Options, gated, ids_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyProcess]:
    found = ComfyProcess(tmp_path_factory.mktemp("comfy"))
    yield found
    found.stop()


@pytest.fixture
def comfy(running: ComfyProcess) -> ComfyProcess:
    """A fresh one for each test, on the same ports."""
    running.anew()
    return running


async def test_a_prompt_waits_for_the_lease_and_gets_comfyuis_own_answer(comfy: ComfyProcess, tmp_path: Path) -> None:
    async with gated(comfy, tmp_path) as rig:
        call = rig.post(prompt(client_id="me"))
        lease = await rig.lease(lambda one: one.state is LeaseState.QUEUED)
        asked = lease.request
        assert (asked.holder, asked.card, asked.vram_mib, asked.label) == (ME, "gpu0", None, "comfyui: 1 prompt")
        assert (asked.klass, asked.owner) == (WorkClass.NORMAL, "local")
        assert not call.done()
        assert not comfy.state()["posted"]
        await rig.grant()
        status, told = await call
        assert (status, told["number"], told["node_errors"]) == (200, 0, {})
        assert (await rig.comfy_has(lambda state: state["done"]))["done"] == [told["prompt_id"]]
        assert comfy.state()["posted"] == [prompt(client_id="me")], "to the letter"


async def test_ten_prompts_cost_one_lease_and_keep_their_order(comfy: ComfyProcess, tmp_path: Path) -> None:
    comfy.tell(hold=True, slow_posts=1)
    async with gated(comfy, tmp_path) as rig:
        calls: list[asyncio.Task[tuple[int, Json]]] = []
        for seed in range(10):
            calls.append(rig.post(prompt(seed=seed), "/prompt" if seed % 2 else "/api/prompt"))
            await rig.waiting(seed + 1)  # each has arrived before the next
        lease = await rig.grant()
        numbers = [(await call)[1]["number"] for call in calls]
        assert numbers == list(range(10))
        comfy.tell(hold=False)
        done = (await rig.comfy_has(lambda state: len(state["done"]) == 10))["done"]
        assert done == [(await call)[1]["prompt_id"] for call in calls]
        assert (await rig.ended(lease)).state is LeaseState.RELEASED
        assert len(await rig.leases()) == 1


async def test_the_lease_ends_once_the_queue_was_empty_for_the_linger_though_a_page_is_open(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path) as rig, rig.client.ws_connect(rig.url + "/ws?clientId=tab"):
        call = rig.post(prompt())
        lease = await rig.grant()
        await call
        await asyncio.sleep(0.5)  # longer than the linger: it is at work
        assert (await rig.leases())[0].state is LeaseState.GRANTED
        comfy.tell(hold=False)
        assert (await rig.ended(lease)).state is LeaseState.RELEASED


async def test_the_lease_is_kept_alive_for_as_long_as_it_is_needed(
    comfy: ComfyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.comfyui.holding.TTL_MS", 300)
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path) as rig:
        call = rig.post(prompt())
        lease = await rig.grant()
        await call
        await rig.until(lambda now: (now.expires_ms or 0) >= (lease.expires_ms or 0) + 300)


async def test_a_prompt_within_the_linger_goes_straight_through(comfy: ComfyProcess, tmp_path: Path) -> None:
    async with gated(comfy, tmp_path, options=Options(linger_s=30)) as rig:
        first = rig.post(prompt())
        await rig.grant()
        await first
        await rig.comfy_has(lambda state: len(state["done"]) == 1)
        assert (await rig.post(prompt()))[0] == 200
        assert len(await rig.leases()) == 1


async def test_after_the_lease_prompts_wait_for_the_next_one(comfy: ComfyProcess, tmp_path: Path) -> None:
    async with gated(comfy, tmp_path) as rig:
        first = rig.post(prompt())
        lease = await rig.grant()
        await first
        await rig.ended(lease)
        second = rig.post(prompt())
        await rig.lease(lambda one: one.id != lease.id)
        assert not second.done()
        await rig.grant()
        assert (await second)[0] == 200


async def test_what_comfyui_refuses_is_passed_on(comfy: ComfyProcess, tmp_path: Path) -> None:
    async with gated(comfy, tmp_path) as rig:
        bad = rig.post({"prompt": {**prompt()["prompt"], "9": {"class_type": "LoadImage", "inputs": {}}}})
        await rig.grant()
        status, told = await bad
        assert (status, told["error"]["type"]) == (400, "prompt_outputs_failed_validation")
        assert told["node_errors"]["9"]["errors"][0]["type"] == "required_input_missing"


async def test_a_client_that_hangs_up_is_dropped_and_the_last_takes_the_lease_along(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    async with gated(comfy, tmp_path) as rig:
        first, second = rig.post(prompt(seed=1)), rig.post(prompt(seed=2))
        lease = await rig.lease(lambda one: one.state is LeaseState.QUEUED)
        first.cancel()
        second.cancel()
        assert (await rig.ended(lease)).state is LeaseState.CANCELLED
        third = rig.post(prompt(seed=3))
        await rig.grant()
        await third
        assert [one["prompt"]["1"]["inputs"]["color"] for one in comfy.state()["posted"]] == [3]


async def test_a_lease_that_fails_answers_all_who_wait_in_comfyuis_shape(comfy: ComfyProcess, tmp_path: Path) -> None:
    async with gated(comfy, tmp_path) as rig:
        calls = [rig.post(prompt()), rig.post(prompt())]
        lease = await rig.lease(lambda one: one.state is LeaseState.QUEUED)
        await rig.waiting(2)
        await rig.change(lease, LeaseState.FAILED, reason="comfyui could not be loaded: no module named torch")
        for call in calls:
            status, told = await call
            assert (status, told["retry_after"], told["node_errors"]) == (503, "30", {})
            assert "no module named torch" in told["error"]["message"]
            assert set(told["error"]) == {"type", "message", "details", "extra_info"}


async def test_a_full_queue_is_429(comfy: ComfyProcess, tmp_path: Path) -> None:
    async with gated(comfy, tmp_path, options=Options(max_queue=0)) as rig:
        status, told = await rig.post(prompt())
        assert (status, told["error"]["type"], told["retry_after"]) == (429, "queue_full", "30")
    async with gated(comfy, tmp_path, options=Options(max_waiting=1)) as rig:
        first = rig.post(prompt())
        await rig.lease(lambda _: True)
        assert (await rig.post(prompt()))[0] == 429
        first.cancel()


async def test_the_class_comes_from_the_header_and_a_more_urgent_one_asks_anew(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    async with gated(comfy, tmp_path) as rig:
        first = rig.post(prompt(), **{"X-Swapper-Class": "batch"})
        lease = await rig.lease(lambda one: one.state is LeaseState.QUEUED)
        assert lease.request.klass is WorkClass.BATCH
        second = rig.post(prompt(), **{"X-Swapper-Class": "interactive"})
        other = await rig.lease(lambda one: one.id != lease.id)
        assert other.request.klass is WorkClass.INTERACTIVE
        assert (await rig.ended(lease)).state is LeaseState.CANCELLED
        await rig.grant()
        assert [(await call)[0] for call in (first, second)] == [200, 200]
        assert (await rig.post(prompt(), **{"X-Swapper-Class": "soon"}))[0] == 400


async def test_prompts_are_taken_out_when_the_lease_is_revoked_and_come_back_as_they_were(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path) as rig:
        beside: Json = {"client_id": "me", "extra_data": {"extra_pnginfo": {"workflow": 7}, "api_key_comfy_org": "k"}}
        calls = [rig.post(prompt(seed=seed, **beside)) for seed in range(3)]
        lease = await rig.grant()
        ids = await ids_of(calls)
        front = await rig.post(prompt(front=True))
        await rig.change(lease, LeaseState.REVOKED, reason="held longer than its max_hold of 3600 s")
        state = await rig.comfy_has(lambda state: not state["pending"])
        assert state["running"] == [ids[0]], "it may end"
        kept = tmp_path / "taken.json"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        late = rig.post(prompt())
        await rig.lease(lambda one: one.state is LeaseState.QUEUED)
        comfy.tick(3)
        await rig.comfy_has(lambda state: state["done"] == [ids[0]])
        assert not late.done()
        before = len(comfy.state()["posted"])
        await rig.grant()
        last = (await late)[1]["prompt_id"]
        comfy.tell(hold=False)
        done = (await rig.comfy_has(lambda state: len(state["done"]) == 5))["done"]
        assert done == [ids[0], front[1]["prompt_id"], ids[1], ids[2], last]
        back = {one["prompt_id"]: one for one in comfy.state()["posted"][before:] if "prompt_id" in one}
        first = back[ids[1]]
        assert (first["number"], first["client_id"], first["extra_data"]) == (1, "me", beside["extra_data"])
        assert not kept.exists()


async def test_what_was_posted_past_the_gate_is_taken_out_as_well_for_the_same_outputs(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path) as rig:
        first = rig.post(prompt())
        lease = await rig.grant()
        await first
        await rig.comfy_has(lambda state: state["running"])
        body = prompt(partial_execution_targets=["3"], client_id="me", extra_data={"a": 1})
        body["prompt"]["4"] = {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}}
        past = await asyncio.to_thread(comfy.post, "/prompt", body)
        await rig.change(lease, LeaseState.REVOKED, reason="max_hold")
        await rig.comfy_has(lambda state: not state["pending"])
        await rig.grant()
        comfy.tell(hold=False)
        await rig.comfy_has(lambda state: past["prompt_id"] in state["done"])
        again = comfy.state()["posted"][-1]
        assert again == {
            **body,
            "prompt_id": past["prompt_id"],
            "number": 1,
            "extra_data": {"a": 1, "client_id": "me"},
        }


async def test_what_runs_is_interrupted_at_the_drain_limit_also_when_that_is_lost(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True, lose_interrupts=2)
    async with gated(comfy, tmp_path, options=Options(drain_s=0.2)) as rig:
        call = rig.post(prompt(steps=5))
        lease = await rig.grant()
        told = (await call)[1]
        await rig.comfy_has(lambda state: state["running"])
        await rig.change(lease, LeaseState.REVOKED, reason="held longer than its max_hold of 3600 s")
        await rig.comfy_has(lambda state: state["calls"].get("POST /interrupt", 0) >= 3)
        comfy.tick(2)
        await rig.comfy_has(lambda state: not state["running"])
        record = comfy.get(f"/history/{told['prompt_id']}")[told["prompt_id"]]
        assert (record["status"]["status_str"], record["status"]["completed"]) == ("error", False)


async def test_within_the_drain_limit_what_runs_is_left_alone(comfy: ComfyProcess, tmp_path: Path) -> None:
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path, options=Options(drain_s=60)) as rig:
        call = rig.post(prompt())
        lease = await rig.grant()
        await call
        await rig.comfy_has(lambda state: state["running"])
        await rig.change(lease, LeaseState.REVOKED, reason="held longer than its max_hold of 3600 s")
        await rig.comfy_has(lambda state: any(client.endswith("-end") for client in state["clients"]))
        comfy.tick(3)
        assert (await rig.comfy_has(lambda state: not state["running"]))["done"]
        assert "POST /interrupt" not in comfy.state()["calls"]


async def test_who_deletes_a_prompt_that_was_taken_out_does_not_get_it_back(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path) as rig:
        calls = [rig.post(prompt(seed=seed)) for seed in range(3)]
        lease = await rig.grant()
        ids = await ids_of(calls)
        await rig.comfy_has(lambda state: state["running"])
        await rig.change(lease, LeaseState.REVOKED, reason="max_hold")
        await rig.lease(lambda one: one.state is LeaseState.QUEUED)
        assert (await rig.post({"delete": [ids[1]]}, "/api/queue"))[0] == 200
        await rig.grant()
        comfy.tell(hold=False)
        done = (await rig.comfy_has(lambda state: len(state["done"]) == 2))["done"]
        assert done == [ids[0], ids[2]]
