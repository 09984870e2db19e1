"""What a gate has in hand outlives its own death and that of ComfyUI: leases, and prompts in its queue or taken out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakeredis import FakeServer

from swapper.core.types import LeaseState, WorkClass
from tests.support.comfyprocess import ComfyProcess, prompt
from tests.unit.comfyui_gate import Options, gated, ids_of


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


async def test_prompts_taken_out_survive_a_kill_of_the_gate(comfy: ComfyProcess, tmp_path: Path) -> None:
    comfy.tell(hold=True)
    redis = FakeServer()
    async with gated(comfy, tmp_path, redis) as rig:
        calls = [rig.post(prompt(seed=seed)) for seed in range(3)]
        lease = await rig.grant()
        for call in calls:
            await call
        await rig.change(lease, LeaseState.REVOKED, reason="max_hold")
        await rig.lease(lambda one: one.state is LeaseState.QUEUED)
    comfy.tell(hold=False)
    async with gated(comfy, tmp_path, redis) as rig:
        await rig.grant()
        assert len((await rig.comfy_has(lambda state: len(state["done"]) == 3))["done"]) == 3
        assert len(await rig.leases()) == 2, "the lease that waited was taken over"


async def test_a_kill_between_the_word_on_disk_and_the_deletion_runs_nothing_twice(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path) as rig:
        calls = [rig.post(prompt(seed=seed)) for seed in range(2)]
        lease = await rig.grant()
        for call in calls:
            await call
        await rig.change(lease, LeaseState.REVOKED, reason="max_hold")
        await rig.lease(lambda one: one.state is LeaseState.QUEUED)
        kept = (tmp_path / "taken.json").read_bytes()
        await rig.grant()
        await rig.comfy_has(lambda state: state["pending"])
    (tmp_path / "taken.json").write_bytes(kept)  # as one that was killed over it leaves it
    comfy.tell(hold=False)
    redis = FakeServer()
    async with gated(comfy, tmp_path, redis) as rig:
        await rig.grant()
        await rig.comfy_has(lambda state: len(state["done"]) == 2 and not state["running"] and not state["pending"])
        await rig.ended((await rig.leases())[0])
        assert len(comfy.state()["done"]) == 2


async def test_a_granted_lease_is_taken_over_with_the_prompts_in_the_queue(comfy: ComfyProcess, tmp_path: Path) -> None:
    comfy.tell(hold=True)
    redis = FakeServer()
    async with gated(comfy, tmp_path, redis) as rig:
        call = rig.post(prompt())
        lease = await rig.grant()
        await call
    async with gated(comfy, tmp_path, redis) as rig:
        assert (await rig.post(prompt()))[0] == 200, "straight through"
        comfy.tell(hold=False)
        assert (await rig.ended(lease)).state is LeaseState.RELEASED
        assert len(comfy.state()["done"]) == 2


async def test_a_comfyui_that_is_too_busy_to_answer_keeps_its_lease(
    comfy: ComfyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = FakeServer()
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path, redis) as rig:
        call = rig.post(prompt())
        lease = await rig.grant()
        await call
    monkeypatch.setattr("swapper.comfyui.gate.LOOK_S", 0.05)
    monkeypatch.setattr("workers.comfyui.http.LIMIT_S", 0.1)
    comfy.tell(silent=True)
    asked = comfy.state()["calls"].get("GET /prompt", 0)
    async with gated(comfy, tmp_path, redis, Options(linger_s=0)) as rig:
        await rig.comfy_has(lambda state: state["calls"].get("GET /prompt", 0) > asked + 4)
        assert (await rig.leases())[0].state is LeaseState.GRANTED
        comfy.tell(silent=False, hold=False)
        assert (await rig.ended(lease)).state is LeaseState.RELEASED
        assert len(comfy.state()["done"]) == 1


async def test_prompts_found_in_the_queue_without_a_lease_get_one(comfy: ComfyProcess, tmp_path: Path) -> None:
    comfy.tell(hold=True)
    await asyncio.to_thread(comfy.post, "/prompt", prompt())
    async with gated(comfy, tmp_path) as rig:
        lease = await rig.grant()
        comfy.tell(hold=False)
        assert (await rig.ended(lease)).state is LeaseState.RELEASED


async def test_a_lease_that_nobody_waits_for_any_more_is_given_up_at_the_start(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    redis = FakeServer()
    async with gated(comfy, tmp_path, redis) as rig:
        call = rig.post(prompt())
        lease = await rig.lease(lambda one: one.state is LeaseState.QUEUED)
    assert (await call)[0] == 503, "who waits at a stop is told"
    async with gated(comfy, tmp_path, redis) as rig:
        assert (await rig.ended(lease)).state is LeaseState.CANCELLED


async def test_where_the_disk_takes_nothing_prompts_are_taken_out_all_the_same(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True)
    (tmp_path / "taken.json.new").mkdir()  # nothing can be written there
    async with gated(comfy, tmp_path) as rig:
        calls = [rig.post(prompt(seed=seed), **{"X-Swapper-Class": "batch"}) for seed in range(2)]
        lease = await rig.grant()
        for call in calls:
            await call
        await rig.change(lease, LeaseState.REVOKED, reason="max_hold")
        await rig.comfy_has(lambda state: not state["pending"])
        comfy.tell(hold=False)
        assert (await rig.grant()).request.klass is WorkClass.BATCH, "as they came"
        await rig.comfy_has(lambda state: len(state["done"]) == 2)


async def test_while_the_store_is_away_a_granted_lease_goes_on_and_no_new_one_is_asked_for(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    redis = FakeServer()
    async with gated(comfy, tmp_path, redis, Options(linger_s=0.5)) as rig:
        first = rig.post(prompt())
        lease = await rig.grant()
        await first
        redis.connected = False
        assert (await rig.post(prompt()))[0] == 200
        redis.connected = True
        assert (await rig.ended(lease)).state is LeaseState.RELEASED
        redis.connected = False
        status, told = await rig.post(prompt())
        assert (status, "store does not answer" in told["error"]["message"]) == (503, True)
        redis.connected = True


async def test_prompts_of_a_comfyui_that_died_in_its_lease_are_posted_again(
    comfy: ComfyProcess, tmp_path: Path
) -> None:
    comfy.tell(hold=True)
    async with gated(comfy, tmp_path) as rig:
        calls = [rig.post(prompt(seed=seed)) for seed in range(3)]
        await rig.grant()
        ids = await ids_of(calls)
        await rig.comfy_has(lambda state: state["running"])
        await asyncio.to_thread(comfy.kill)
        late = rig.post(prompt(seed=9))
        await asyncio.to_thread(comfy.start)
        told = (await late)[1]
        done = (await rig.comfy_has(lambda state: len(state["done"]) == 4))["done"]
        assert done == [*ids, told["prompt_id"]]
        assert len(await rig.leases()) == 1


async def test_a_prompt_over_which_it_died_twice_is_given_up(comfy: ComfyProcess, tmp_path: Path) -> None:
    comfy.from_the_start(hold=True)
    comfy.tell(hold=True)
    try:
        async with gated(comfy, tmp_path) as rig:
            calls = [rig.post(prompt(seed=seed)) for seed in range(2)]
            await rig.grant()
            ids = await ids_of(calls)
            for _ in range(2):
                await rig.comfy_has(lambda state: state["running"] == ids[:1])
                await asyncio.to_thread(comfy.kill)
                await asyncio.to_thread(comfy.start)
            await rig.comfy_has(lambda state: state["running"] == ids[1:])
            assert not comfy.state()["pending"]
    finally:
        (comfy.folder / "lies").unlink()


async def test_while_it_cannot_be_started_in_its_lease_who_waits_is_told(comfy: ComfyProcess, tmp_path: Path) -> None:
    why: list[str] = []
    async with gated(comfy, tmp_path, options=Options(failing=lambda: why[0] if why else None)) as rig:
        first = rig.post(prompt())
        await rig.grant()
        await first
        await asyncio.to_thread(comfy.kill)
        why.append("no module named torch")
        status, told = await rig.post(prompt())
        assert (status, "no module named torch" in told["error"]["message"]) == (503, True)
