"""Both kinds of llama-server backend: what they save comes back, and what must not come back does not."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from swapper.errors import BackendError, BackendRefused
from swapper.snapshots.manifest import MANIFEST_SUFFIX, Manifest
from tests.contract.conftest import World
from tests.contract.saving import LONG, fresh, fresh_load, save
from tests.contract.talk import Talk
from workers.backend import Backend, SaveArgs, Saved, SlotUse, TenantState
from workers.backend import Talk as Conversation
from workers.llama import slots
from workers.llama.http import RouterHttp


@pytest.fixture
def world(either_kind: World) -> World:
    return either_kind


async def test_two_conversations_survive_a_release_and_a_load_word_for_word(backend: Backend, talk: Talk) -> None:
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


async def test_whose_conversation_was_saved_is_told_by_the_next_load(backend: Backend, talk: Talk) -> None:
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


async def test_saves_and_restores_run_side_by_side_and_ask_for_nothing_twice(
    backend: Backend, talk: Talk, monkeypatch: pytest.MonkeyPatch
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


async def test_a_fresh_load_leaves_every_slot_empty(backend: Backend) -> None:
    await fresh_load(backend, "alpha")
    assert (await backend.quiesce("llama/alpha")).slots == ()


async def test_a_restored_slot_counts_as_used_before_any_call(backend: Backend, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await fresh_load(backend, "alpha")
    await backend.restore("llama/alpha", saved.snapshot, 0)
    [use] = (await backend.quiesce("llama/alpha")).slots
    assert use in (SlotUse(0, 0), SlotUse(0, saved.tokens))
    assert (await save(backend, "alpha")).tokens == saved.tokens


async def test_an_empty_slot_leaves_no_file(backend: Backend, world: World) -> None:
    await fresh_load(backend, "alpha")
    saved = await save(backend, "alpha", 1)
    assert (saved.tokens, saved.bytes) == (0, 0)
    assert not list(world.slots.glob(saved.snapshot + "*"))


async def test_a_snapshot_is_private_and_its_manifest_gets_a_digest(backend: Backend, talk: Talk, world: World) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await backend.close()
    paths = [world.slots / saved.snapshot, world.slots / (saved.snapshot + MANIFEST_SUFFIX)]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    assert '"digest": "' in paths[1].read_text()


@pytest.mark.parametrize("name", ["../x.kv", "a:b", "", "x" + MANIFEST_SUFFIX])
async def test_an_unsafe_name_never_reaches_the_server(backend: Backend, name: str) -> None:
    with pytest.raises(BackendRefused):
        await backend.save("llama/alpha", SaveArgs(0, name))


async def test_a_slot_that_does_not_exist_is_refused_instead_of_wrapped(backend: Backend) -> None:
    await backend.load("llama/alpha")
    with pytest.raises(BackendRefused, match="there is no slot 9"):
        await save(backend, "alpha", 9)


async def test_a_file_one_byte_short_is_refused_before_the_server_sees_it(
    backend: Backend, talk: Talk, world: World
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


async def refusal_of(backend: Backend, saved: Saved) -> str | None:
    listed = {s.snapshot: s.refused for s in (await backend.load("llama/alpha")).snapshots}
    return listed.get(saved.snapshot, "not listed")


async def test_a_changed_byte_is_refused_by_the_digest(backend: Backend, talk: Talk, world: World) -> None:
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


async def test_a_slot_that_was_taken_is_not_overwritten(backend: Backend, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    with pytest.raises(BackendRefused, match=r"slot 0 was taken: it holds \d+ tokens"):
        await backend.restore("llama/alpha", saved.snapshot, 0)


async def test_a_restore_that_cannot_be_noted_on_a_full_disk_is_a_restore(
    backend: Backend, talk: Talk, world: World, monkeypatch: pytest.MonkeyPatch
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


async def wrongly_sealed(backend: Backend, talk: Talk, world: World) -> Saved:
    """A snapshot whose manifest speaks of 5 tokens."""
    await fresh_load(backend, "alpha")
    await talk.say("alpha", LONG, slot=0)
    saved = await save(backend, "alpha")
    await backend.close()
    manifest = world.slots / (saved.snapshot + MANIFEST_SUFFIX)
    manifest.write_text(manifest.read_text().replace(f'"tokens": {saved.tokens}', '"tokens": 5'))
    await fresh_load(backend, "alpha")
    return saved


async def test_a_restore_judged_wrong_leaves_nothing_in_its_slot(backend: Backend, talk: Talk, world: World) -> None:
    saved = await wrongly_sealed(backend, talk, world)
    with pytest.raises(BackendError, match=rf"restored {saved.tokens} of 5 tokens of .*, so slot 0 was emptied again"):
        await backend.restore("llama/alpha", saved.snapshot, 0)
    assert (await backend.quiesce("llama/alpha")).slots == ()
    assert (await talk.say("alpha", LONG, slot=0))["timings"]["cache_n"] == 0


async def test_a_wrong_restore_that_cannot_be_taken_back_says_so(
    backend: Backend, talk: Talk, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = await wrongly_sealed(backend, talk, world)

    async def refuse(_http: RouterHttp, _model: str, _slot: int) -> None:
        raise BackendRefused("no", 500)

    monkeypatch.setattr(RouterHttp, "erase", refuse)
    with pytest.raises(BackendError, match=r"of 5 tokens of .*, and slot 0 could not be emptied again: no"):
        await backend.restore("llama/alpha", saved.snapshot, 0)


async def test_what_was_restored_goes_once_its_newer_save_is_complete_and_the_rest_stays(
    backend: Backend, talk: Talk, world: World
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
    backend: Backend, talk: Talk, world: World
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


async def test_quiesce_waits_for_the_answer_that_is_being_written(backend: Backend, talk: Talk) -> None:
    await fresh_load(backend, "alpha")
    async with talk.streaming("alpha", 300) as stream:
        quiet = asyncio.create_task(backend.quiesce("llama/alpha"))
        await stream.read()
        assert [use.tokens for use in (await quiet).slots] == [7 + 300 - 1]


async def test_a_release_with_a_call_in_flight_ends_at_its_limit_and_is_no_failure(
    backend: Backend, talk: Talk
) -> None:
    await fresh_load(backend, "alpha")
    async with (
        talk.streaming("alpha", 4000),
        asyncio.timeout(5),
    ):  # a plain one has its grace
        await backend.release("llama/alpha", limit_ms=100)
    assert (await backend.observe())["llama/alpha"] is TenantState.UNLOADED
