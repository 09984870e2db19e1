"""The llama-router backend on a real server: what it saves comes back, and what must not come back does not."""

from __future__ import annotations

import asyncio
import errno
import os
from itertools import count
from pathlib import Path

import pytest

from swapper.errors import BackendError, BackendRefused
from swapper.snapshots.manifest import MANIFEST_SUFFIX, Manifest
from tests.contract.conftest import Router, World
from tests.contract.talk import Talk, until
from workers.backend import SaveArgs, Saved, SaveUnsupported, SlotUse, TenantState
from workers.backend import Talk as Conversation
from workers.llama import slots
from workers.llama.http import RouterHttp
from workers.llama.router import LlamaRouter

LONG = "Colourless green ideas sleep furiously in the garden. " * 10
_numbers = count(1)


def fresh(model: str) -> str:
    return f"{model}.{next(_numbers)}.kv"


async def save(backend: LlamaRouter, model: str, slot: int = 0) -> Saved:
    return await backend.save(f"llama/{model}", SaveArgs(slot, fresh(model)))


async def fresh_load(backend: LlamaRouter, model: str) -> None:
    await backend.release(f"llama/{model}", limit_ms=10_000)
    await backend.load(f"llama/{model}")


async def refusal_of(backend: LlamaRouter, saved: Saved) -> str | None:
    listed = {s.snapshot: s.refused for s in (await backend.load("llama/alpha")).snapshots}
    return listed.get(saved.snapshot, "not listed")


async def test_two_conversations_survive_a_release_and_a_load_word_for_word(backend: LlamaRouter, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    prompts = [LONG + "First.", LONG[::-1] + "Second."]
    prompts = [p + (await talk.say("alpha", p, slot=i))["content"] + " Next." for i, p in enumerate(prompts)]
    slots = (await backend.quiesce("llama/alpha")).slots
    saved = [await save(backend, "alpha", use.slot) for use in slots]
    assert [s.tokens for s in saved] == [use.tokens for use in slots]

    await backend.release("llama/alpha", limit_ms=10_000)
    assert (await backend.observe())["llama/alpha"] is TenantState.UNLOADED
    loaded = await backend.load("llama/alpha")
    assert (loaded.n_slots, loaded.n_ctx_slot) == (2, 4096)
    assert [(s.snapshot, s.refused) for s in loaded.snapshots[:2]] == [(s.snapshot, None) for s in reversed(saved)]
    for snapshot in saved:
        back = await backend.restore("llama/alpha", snapshot.snapshot, snapshot.slot)
        assert back.tokens == snapshot.tokens
    for snapshot, prompt in zip(saved, prompts, strict=True):
        answer = await talk.say("alpha", prompt)
        assert answer["timings"]["cache_n"] >= 0.99 * snapshot.tokens
        assert answer["id_slot"] == snapshot.slot


async def test_whose_conversation_was_saved_is_told_by_the_next_load(backend: LlamaRouter, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    for slot in range(2):
        await talk.say("alpha", f"{slot} " + LONG, slot=slot)
    idle = await backend.quiesce("llama/alpha")
    links = tuple(f"{n:032x}" for n in range(9))
    known = Conversation(links[-1], links, used_ms=5)
    first = await backend.save("llama/alpha", SaveArgs(0, fresh("alpha"), known, "rewind", token=7))
    second = await save(backend, "alpha", 1)

    await backend.release("llama/alpha", limit_ms=10_000)
    loaded = await backend.load("llama/alpha")
    told = {info.snapshot: info for info in loaded.snapshots}
    mine, other = told[first.snapshot], told[second.snapshot]
    assert (mine.id, mine.links, mine.used_ms, mine.strategy) == (links[-1], links[-8:], 5, "rewind")
    assert (other.id, other.links, other.used_ms, other.strategy) == ("", (), 0, "slots")
    assert (loaded.strategies, loaded.fingerprint) == (idle.strategies, idle.fingerprint)
    assert loaded.fingerprint != ""


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


async def test_saves_and_restores_run_side_by_side_and_ask_for_nothing_twice(
    backend: LlamaRouter, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fresh_load(backend, "alpha")
    for slot in range(2):
        await talk.say("alpha", f"{slot} " + LONG, slot=slot)
    asked: list[str] = []
    read = RouterHttp._read  # pyright: ignore[reportPrivateUsage]

    async def counted(http: RouterHttp, path: str, model: str | None = None) -> bytes:
        asked.append(path)
        return await read(http, path, model)

    await backend.quiesce("llama/alpha")
    monkeypatch.setattr(RouterHttp, "_read", counted)
    saved = await asyncio.gather(*(save(backend, "alpha", slot) for slot in range(2)))
    assert asked == []
    await fresh_load(backend, "alpha")
    asked.clear()
    back = await asyncio.gather(*(backend.restore("llama/alpha", s.snapshot, s.slot) for s in saved))
    assert [b.tokens for b in back] == [s.tokens for s in saved]
    assert asked == ["/slots"]


async def test_what_was_unloaded_by_somebody_else_is_not_saved_from_memory(backend: LlamaRouter, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    await backend.quiesce("llama/alpha")
    await talk.unload("alpha")
    with pytest.raises(BackendRefused, match="not loaded"):
        await save(backend, "alpha")


async def test_a_fresh_load_leaves_every_slot_empty(backend: LlamaRouter) -> None:
    await fresh_load(backend, "alpha")
    assert (await backend.quiesce("llama/alpha")).slots == ()


async def test_a_restored_slot_counts_as_used_before_any_call(backend: LlamaRouter, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await fresh_load(backend, "alpha")
    await backend.restore("llama/alpha", saved.snapshot, 0)
    [use] = (await backend.quiesce("llama/alpha")).slots
    assert use in (SlotUse(0, 0), SlotUse(0, saved.tokens))
    assert (await save(backend, "alpha")).tokens == saved.tokens


async def test_a_model_somebody_else_loaded_may_hold_something_in_every_silent_slot(
    backend: LlamaRouter, talk: Talk
) -> None:
    await talk.reload("alpha")
    assert (await backend.quiesce("llama/alpha")).slots == (SlotUse(0, 0), SlotUse(1, 0))


async def test_an_empty_slot_leaves_no_file(backend: LlamaRouter, world: World) -> None:
    await fresh_load(backend, "alpha")
    saved = await save(backend, "alpha", 1)
    assert (saved.tokens, saved.bytes) == (0, 0)
    assert not list(world.slots.glob(saved.snapshot + "*"))


async def test_a_snapshot_is_private_and_its_manifest_gets_a_digest(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await backend.close()
    paths = [world.slots / saved.snapshot, world.slots / (saved.snapshot + MANIFEST_SUFFIX)]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    assert '"digest": "' in paths[1].read_text()


@pytest.mark.parametrize("name", ["../x.kv", "a:b", "", "x" + MANIFEST_SUFFIX])
async def test_an_unsafe_name_never_reaches_the_server(backend: LlamaRouter, name: str) -> None:
    with pytest.raises(BackendRefused):
        await backend.save("llama/alpha", SaveArgs(0, name))


async def test_a_slot_that_does_not_exist_is_refused_instead_of_wrapped(backend: LlamaRouter) -> None:
    await backend.load("llama/alpha")
    with pytest.raises(BackendRefused, match="there is no slot 9"):
        await save(backend, "alpha", 9)


async def test_a_file_one_byte_short_is_refused_before_the_server_sees_it(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    path = world.slots / saved.snapshot
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BackendRefused, match=f"{saved.bytes - 1} bytes instead of {saved.bytes}"):
        await backend.restore("llama/alpha", saved.snapshot, 1)
    assert (await backend.observe())["llama/alpha"] is TenantState.LOADED
    listed = {s.snapshot: s.refused for s in (await backend.load("llama/alpha")).snapshots}
    assert "bytes instead of" in (listed[saved.snapshot] or "")


async def test_a_changed_byte_is_refused_by_the_digest(backend: LlamaRouter, talk: Talk, world: World) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await backend.close()
    path = world.slots / saved.snapshot
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BackendRefused, match="damaged since the save"):
        await backend.restore("llama/alpha", saved.snapshot, 1)
    assert await refusal_of(backend, saved) == "its file was damaged since the save (the digest differs)"
    await backend.release("llama/alpha", limit_ms=10_000)
    assert await refusal_of(backend, saved) == "not listed"
    assert path.exists()


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


async def test_a_slot_that_was_taken_is_not_overwritten(backend: LlamaRouter, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    with pytest.raises(BackendRefused, match=r"slot 0 was taken: it holds \d+ tokens"):
        await backend.restore("llama/alpha", saved.snapshot, 0)


async def test_a_restore_that_cannot_be_noted_on_a_full_disk_is_a_restore(
    backend: LlamaRouter, talk: Talk, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await fresh_load(backend, "alpha")

    def full(_manifest: Manifest) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(slots, "encode", full)
        assert (await backend.restore("llama/alpha", saved.snapshot, 0)).tokens == saved.tokens
    assert (await talk.say("alpha", LONG, slot=0))["timings"]["cache_n"] > 0.9 * saved.tokens
    assert not list(world.slots.glob("*.tmp"))


async def wrongly_sealed(backend: LlamaRouter, talk: Talk, world: World) -> Saved:
    """A snapshot whose manifest speaks of 5 tokens."""
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await backend.close()
    manifest = world.slots / (saved.snapshot + MANIFEST_SUFFIX)
    manifest.write_text(manifest.read_text().replace(f'"tokens": {saved.tokens}', '"tokens": 5'))
    await fresh_load(backend, "alpha")
    return saved


async def test_a_restore_judged_wrong_leaves_nothing_in_its_slot(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    saved = await wrongly_sealed(backend, talk, world)
    with pytest.raises(BackendError, match=rf"restored {saved.tokens} of 5 tokens of .*, so slot 0 was emptied again"):
        await backend.restore("llama/alpha", saved.snapshot, 0)
    assert (await backend.quiesce("llama/alpha")).slots == ()
    assert (await talk.say("alpha", LONG, slot=0))["timings"]["cache_n"] == 0


async def test_a_wrong_restore_that_cannot_be_taken_back_says_so(
    backend: LlamaRouter, talk: Talk, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = await wrongly_sealed(backend, talk, world)

    async def refuse(_http: RouterHttp, _model: str, _slot: int) -> None:
        raise BackendRefused("no", 500)

    monkeypatch.setattr(RouterHttp, "erase", refuse)
    with pytest.raises(BackendError, match=r"of 5 tokens of .*, and slot 0 could not be emptied again: no"):
        await backend.restore("llama/alpha", saved.snapshot, 0)


async def test_what_was_restored_goes_once_its_newer_save_is_complete_and_the_rest_stays(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    first, never = await save(backend, "alpha"), await save(backend, "alpha")
    await fresh_load(backend, "alpha")
    await backend.restore("llama/alpha", first.snapshot, 0)
    second = await save(backend, "alpha")
    await fresh_load(backend, "alpha")
    kept = {path.name for path in world.slots.iterdir()}
    assert first.snapshot not in kept
    assert {never.snapshot, second.snapshot} <= kept


async def test_what_was_restored_stays_when_a_stranger_took_its_slot(
    backend: LlamaRouter, talk: Talk, world: World
) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    first = await save(backend, "alpha")
    await fresh_load(backend, "alpha")
    await backend.restore("llama/alpha", first.snapshot, 0)
    await talk.say("alpha", "A stranger.", slot=0)
    assert 0 < (await save(backend, "alpha")).tokens < first.tokens
    await fresh_load(backend, "alpha")
    assert (world.slots / first.snapshot).exists()


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


async def test_quiesce_waits_for_the_answer_that_is_being_written(backend: LlamaRouter, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    async with talk.streaming("alpha", 300) as stream:
        quiet = asyncio.create_task(backend.quiesce("llama/alpha"))
        await stream.read()
        assert [use.tokens for use in (await quiet).slots] == [7 + 300 - 1]


async def test_a_release_with_a_call_in_flight_ends_at_its_limit_and_is_no_failure(
    backend: LlamaRouter, talk: Talk
) -> None:
    await fresh_load(backend, "alpha")
    async with talk.streaming("alpha", 4000), asyncio.timeout(5):  # the server's own limit is 10 s
        await backend.release("llama/alpha", limit_ms=100)
    assert (await backend.observe())["llama/alpha"] is TenantState.UNLOADED


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
