"""The llama-router backend on a real server: what it saves comes back, and what must not come back does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swapper.errors import BackendError, BackendRefused
from swapper.snapshots.manifest import MANIFEST_SUFFIX
from tests.contract.conftest import Router, World
from tests.contract.saving import LONG, fresh_load, save
from tests.contract.talk import Talk, until
from workers.backend import SaveArgs, SaveUnsupported, SlotUse, TenantState
from workers.llama.router import LlamaRouter


@pytest.mark.parametrize(
    ("model", "best"),
    [("alpha", ("slots", "replay")), ("gemma", ("replay",)), ("lfm", ("rewind", "replay"))],
)
async def test_how_conversations_are_kept_follows_from_the_models_own_file(
    backend: LlamaRouter, model: str, best: tuple[str, ...]
) -> None:
    assert (await backend.load(f"llama/{model}")).strategies == best
    assert (await backend.quiesce(f"llama/{model}")).strategies == best
    await backend.release(f"llama/{model}", limit_ms=10_000)


async def test_what_was_unloaded_by_somebody_else_is_not_saved_from_memory(backend: LlamaRouter, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    await backend.quiesce("llama/alpha")
    await talk.unload("alpha")
    with pytest.raises(BackendRefused, match="not loaded"):
        await save(backend, "alpha")


async def test_a_model_somebody_else_loaded_may_hold_something_in_every_silent_slot(
    backend: LlamaRouter, talk: Talk
) -> None:
    await talk.reload("alpha")
    assert (await backend.quiesce("llama/alpha")).slots == (SlotUse(0, 0), SlotUse(1, 0))


async def test_the_snapshot_of_another_model_of_the_same_shape_is_refused(
    backend: LlamaRouter, talk: Talk, world: World, tmp_path: Path
) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await backend.close()
    manifest = world.slots / (saved.snapshot + MANIFEST_SUFFIX)
    manifest.write_text(manifest.read_text().replace('"tenant": "llama/alpha"', '"tenant": "llama/beta"'))
    await backend.load("llama/beta")
    with pytest.raises(BackendRefused, match="another model file"):
        await backend.restore("llama/beta", saved.snapshot, 0)
    await backend.release("llama/beta", limit_ms=10_000)
    with pytest.raises(BackendRefused, match="no snapshot of llama/alpha"):
        await backend.restore("llama/alpha", saved.snapshot, 0)


async def test_a_slot_folder_that_is_not_the_servers_is_named_beside_the_right_one(
    world: World, talk: Talk, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    backend = LlamaRouter(world.router.url, tenants={"l/alpha": "alpha"}, state_dir=tmp_path, slot_dir=wrong)
    await talk.reload("alpha")
    await talk.say("alpha", LONG, slot=0)
    with pytest.raises(BackendError) as caught:
        await backend.save("l/alpha", SaveArgs(0, "astray.kv"))
    await backend.close()
    assert str(wrong) in str(caught.value)
    assert str(world.slots) in str(caught.value)


async def test_a_server_without_a_slot_folder_cannot_save_and_says_so_as_such(
    bare_router: Router, tmp_path: Path
) -> None:
    backend = LlamaRouter(bare_router.url, tenants={"l/alpha": "alpha"}, state_dir=tmp_path, slot_dir=tmp_path)
    await backend.load("l/alpha")
    with pytest.raises(SaveUnsupported, match="--slot-save-path"):
        await backend.save("l/alpha", SaveArgs(0, "x.kv"))
    assert (await backend.quiesce("l/alpha")).strategies == ()
    await backend.close()


async def test_a_damaged_model_fails_with_the_servers_own_reason_in_one_line(backend: LlamaRouter) -> None:
    with pytest.raises(BackendError, match=r"could not load broken \(exit code 1\): .*load") as caught:
        await backend.load("llama/broken")
    said = str(caught.value)
    assert "\n" not in said
    assert "is not within the file bounds" in said
    assert "llama-server.log, lines that begin with [" in said
    assert (await backend.observe())["llama/broken"] is TenantState.FAILED


async def test_of_a_server_that_is_not_ours_it_is_said_how_the_model_ended_and_in_whose_log_to_look(
    world: World, tmp_path: Path
) -> None:
    backend = LlamaRouter(world.router.url, tenants={"llama/broken": "broken"}, state_dir=tmp_path)
    whose = f"the log of the llama-server at {world.router.url}, which swapper did not start"
    with pytest.raises(BackendError, match=rf"\(exit code 1\); .*{whose}: see its lines that begin with \[\d+\]$"):
        await backend.load("llama/broken")
    await backend.close()


async def test_a_model_the_router_does_not_know_is_named_with_those_it_knows(backend: LlamaRouter) -> None:
    with pytest.raises(BackendRefused, match=r"no model 'absent'; it has: .*alpha"):
        await backend.load("llama/absent")


async def test_a_model_for_embeddings_proves_itself_by_an_embedding(backend: LlamaRouter) -> None:
    await fresh_load(backend, "vectors")
    assert (await backend.quiesce("llama/vectors")).slots == ()
    await backend.release("llama/vectors", limit_ms=10_000)


async def test_releasing_twice_is_harmless(backend: LlamaRouter) -> None:
    await backend.load("llama/beta")
    await backend.release("llama/beta", limit_ms=10_000)
    await backend.release("llama/beta", limit_ms=10_000)


async def test_a_sleeping_model_is_never_woken_and_can_be_released(backend: LlamaRouter, talk: Talk) -> None:
    await talk.unload("sleepy")
    async with talk.events() as events:
        await talk.post("/models/load", {"model": "sleepy"})
        await until(events, "sleepy", "sleeping")
    assert (await backend.observe())["llama/sleepy"] is TenantState.SLEEPING
    assert (await backend.quiesce("llama/sleepy")).slots == ()
    assert await talk.status("sleepy") == "sleeping"
    await backend.release("llama/sleepy", limit_ms=10_000)
    assert (await backend.observe())["llama/sleepy"] is TenantState.UNLOADED


async def test_a_model_that_left_the_configuration_is_seen_and_can_be_sent_away_but_not_brought(
    world: World, talk: Talk, tmp_path: Path
) -> None:
    await talk.reload("beta")
    backend = LlamaRouter(world.router.url, tenants={"llama/alpha": "alpha"}, state_dir=tmp_path)
    try:
        assert (await backend.observe())["llama/beta"] is TenantState.LOADED
        assert len((await backend.quiesce("llama/beta")).slots) == 2
        await backend.release("llama/beta", limit_ms=10_000)
        assert (await backend.observe())["llama/beta"] is TenantState.UNLOADED
        with pytest.raises(BackendRefused, match="no tenant of the router"):
            await backend.load("llama/beta")
    finally:
        await backend.close()


async def test_changes_come_once_connected_and_again_when_a_model_moves(backend: LlamaRouter, talk: Talk) -> None:
    await talk.unload("beta")
    changes = backend.changes()
    await anext(changes)
    await talk.post("/models/load", {"model": "beta"})
    while (await backend.observe())["llama/beta"] is not TenantState.LOADED:
        await anext(changes)
    await talk.unload("beta")


async def test_a_router_that_is_not_there_is_stopped(tmp_path: Path) -> None:
    backend = LlamaRouter("http://127.0.0.1:9", tenants={"l/alpha": "alpha"}, state_dir=tmp_path)
    assert await backend.observe() == {"l/alpha": TenantState.STOPPED}
    await backend.close()


async def test_a_load_waits_for_a_router_that_is_only_being_started(
    another: type[Router], tmp_path: Path, models: dict[str, Path]
) -> None:
    router = another(tmp_path / "router", {"alpha": models["alpha"]}, defaults={"threads": "1"})
    backend = LlamaRouter(router.url, tenants={"l/alpha": "alpha"}, state_dir=tmp_path, slot_dir=router.slot_dir)
    try:
        load = asyncio.create_task(backend.load("l/alpha"))
        await asyncio.to_thread(router.start)
        assert (await load).n_slots == 2
    finally:
        await backend.close()
        router.stop()
