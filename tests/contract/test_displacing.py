"""A conversation that stayed on disk comes back into a running model, and what must leave its slot is saved first."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from swapper.errors import BackendRefused
from tests.contract.conftest import World, backend_of
from tests.contract.saving import LONG
from tests.contract.talk import Talk
from workers.backend import Backend, Room, SaveArgs, Saved, SlotUse, WouldPushOut
from workers.backend import Talk as Conversation
from workers.llama.http import RestoredSlot, RouterHttp, SavedSlot

ALPHA = "llama/alpha"
_numbers = count(1)


@pytest.fixture
def world(either_kind: World) -> World:
    return either_kind


def fresh() -> str:
    return f"displaced.{next(_numbers)}.kv"


async def on_disk(backend: Backend, talk: Talk) -> Saved:
    """A conversation that is in no slot, in a model just loaded."""
    await backend.release(ALPHA, limit_ms=10_000)
    await backend.load(ALPHA)
    await talk.say("alpha", "Kept. " + LONG, slot=0)
    saved = await backend.save(ALPHA, SaveArgs(0, fresh(), Conversation("kept", ("kept",), used_ms=1)))
    await backend.release(ALPHA, limit_ms=10_000)
    await backend.load(ALPHA)
    return saved


async def two_others(talk: Talk) -> tuple[int, int]:
    """Both slots hold something, the second one the older; returns their tokens."""
    sizes = [0, 0]
    for slot in (1, 0):
        await talk.say("alpha", f"Other {'!' * slot} " + LONG, slot=slot)
        sizes[slot] = (await talk.slot("alpha", slot))["n_prompt_tokens"]
    return sizes[0], sizes[1]


async def reused(talk: Talk, slot: int, prompt: str) -> int:
    answer = await talk.say("alpha", prompt)
    assert answer["id_slot"] == slot
    return answer["timings"]["cache_n"]


async def test_an_empty_slot_is_taken_and_nothing_is_displaced(backend: Backend, talk: Talk) -> None:
    saved = await on_disk(backend, talk)
    await talk.say("alpha", "Other. " + LONG, slot=0)
    back = await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh()))
    assert (back.slot, back.tokens, back.displaced) == (1, saved.tokens, None)
    assert await reused(talk, 1, "Kept. " + LONG) > 0.9 * saved.tokens


async def test_what_came_back_already_is_not_brought_again_over_what_it_has_become(
    backend: Backend, talk: Talk
) -> None:
    """Who asks once more has not heard of it: a report may be taken twice, and two gateways may want it."""
    saved = await on_disk(backend, talk)
    await two_others(talk)
    first = await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh()))
    again = await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh()))
    assert (again.slot, again.tokens, again.displaced) == (first.slot, saved.tokens, None)
    await talk.say("alpha", "Kept. " + LONG + " And on.", slot=first.slot)
    grown = (await talk.slot("alpha", first.slot))["n_prompt_tokens"]
    late = await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh()))
    assert (late.slot, late.displaced) == (first.slot, None)
    assert (await talk.slot("alpha", first.slot))["n_prompt_tokens"] == grown > saved.tokens


async def test_who_carries_it_out_again_after_a_death_takes_the_same_slot_and_pushes_out_no_other(
    world: World, backend: Backend, talk: Talk, tmp_path: Path
) -> None:
    saved = await on_disk(backend, talk)
    newer, older = await two_others(talk)
    room = Room(fresh(), (Conversation("older", ("older",), older, used_ms=4),), token=3)
    first = await backend.restore(ALPHA, saved.snapshot, -1, room)
    successor = backend_of(world, tmp_path / "state of the next")
    await successor.start()
    try:
        again = await successor.restore(ALPHA, saved.snapshot, -1, room)
    finally:
        await successor.close()
    assert (again.slot, again.tokens, again.displaced) == (first.slot, first.tokens, first.displaced)
    assert again.displaced is not None
    assert (again.displaced.id, again.displaced.tokens) == ("older", older)
    assert (await talk.slot("alpha", 0))["n_prompt_tokens"] == newer
    assert await reused(talk, first.slot, "Kept. " + LONG) > 0.9 * saved.tokens


async def test_a_save_that_was_done_is_not_done_again_over_its_file(backend: Backend, talk: Talk) -> None:
    """Names are fresh: who asks for it again lost the record of it, and the slot may hold something else by now."""
    saved = await on_disk(backend, talk)
    await talk.say("alpha", "Another, in that slot. " + LONG, slot=0)
    again = await backend.save(ALPHA, SaveArgs(0, saved.snapshot, Conversation("kept")))
    assert (again.snapshot, again.tokens, again.bytes) == (saved.snapshot, saved.tokens, saved.bytes)
    back = await backend.restore(ALPHA, saved.snapshot, 1)
    assert back.tokens == saved.tokens


async def test_without_room_only_an_empty_slot_will_do(backend: Backend, talk: Talk) -> None:
    saved = await on_disk(backend, talk)
    await two_others(talk)
    with pytest.raises(BackendRefused, match=r"no slot of .*alpha is empty"):
        await backend.restore(ALPHA, saved.snapshot, -1)


async def test_what_was_unused_for_longest_makes_room_and_comes_back_later_word_for_word(
    backend: Backend, talk: Talk
) -> None:
    saved = await on_disk(backend, talk)
    _, older = await two_others(talk)
    talks = (Conversation("newer", tokens=7), Conversation("older", ("o1", "older"), older, used_ms=4))
    back = await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh(), talks, token=3))
    assert back.displaced is not None
    assert (back.slot, back.displaced.tokens, back.displaced.id) == (1, older, "older")
    assert await reused(talk, 1, "Kept. " + LONG) > 0.9 * saved.tokens

    again = await backend.restore(ALPHA, back.displaced.snapshot, -1, Room(fresh()))
    assert (again.slot, again.tokens) == (0, older)
    assert await reused(talk, 0, "Other ! " + LONG) > 0.9 * older
    await backend.release(ALPHA, limit_ms=10_000)
    told = {info.snapshot: info for info in (await backend.load(ALPHA)).snapshots}
    assert told[back.displaced.snapshot].links == ("o1", "older")
    assert told[back.displaced.snapshot].used_ms == 4


async def test_whose_conversation_left_is_not_guessed_between_two_of_the_same_length(
    backend: Backend, talk: Talk
) -> None:
    saved = await on_disk(backend, talk)
    _, older = await two_others(talk)
    twins = (Conversation("a", tokens=older), Conversation("b", tokens=older))
    back = await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh(), twins))
    assert back.displaced is not None
    assert back.displaced.id == ""


async def test_what_came_from_disk_and_was_not_spoken_to_leaves_first_and_is_known_by_its_manifest(
    backend: Backend, talk: Talk
) -> None:
    saved = await on_disk(backend, talk)
    await talk.say("alpha", "Other. " + LONG, slot=0)
    await backend.restore(ALPHA, saved.snapshot, 1)
    other = await backend.save(ALPHA, SaveArgs(0, fresh()))
    back = await backend.restore(ALPHA, other.snapshot, -1, Room(fresh()))
    assert back.displaced is not None
    assert (back.slot, back.displaced.tokens, back.displaced.id) == (1, saved.tokens, "kept")


async def test_what_was_asked_back_a_moment_ago_does_not_leave_for_the_next(backend: Backend, talk: Talk) -> None:
    saved = await on_disk(backend, talk)
    await two_others(talk)
    first = await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh()))
    assert first.displaced is not None
    second = await backend.restore(ALPHA, first.displaced.snapshot, -1, Room(fresh()))
    assert (first.slot, second.slot) == (1, 0)


async def test_two_that_come_back_at_once_get_two_slots(backend: Backend, talk: Talk) -> None:
    await on_disk(backend, talk)
    await two_others(talk)
    saved = [await backend.save(ALPHA, SaveArgs(slot, fresh())) for slot in (0, 1)]
    await backend.release(ALPHA, limit_ms=10_000)
    await backend.load(ALPHA)
    for one in saved:  # so that nothing but the slots is left to look at
        await backend.restore(ALPHA, one.snapshot, one.slot)
    await backend.release(ALPHA, limit_ms=10_000)
    await backend.load(ALPHA)
    back = await asyncio.gather(*(backend.restore(ALPHA, one.snapshot, -1, Room(fresh())) for one in saved))
    assert {one.slot for one in back} == {0, 1}


async def test_a_slot_at_work_is_never_taken(backend: Backend, talk: Talk) -> None:
    saved = await on_disk(backend, talk)
    _, older = await two_others(talk)
    async with talk.streaming("alpha", 3500), talk.streaming("alpha", 3500):
        with pytest.raises(BackendRefused, match=r"every slot of .*alpha is at work"):
            await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh()))
    assert older > 0


async def test_a_conversation_that_goes_on_while_it_is_saved_is_not_displaced(
    backend: Backend, talk: Talk, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = await on_disk(backend, talk)
    await two_others(talk)
    save, room = RouterHttp.save, Room(fresh())

    async def overtaken(http: RouterHttp, model: str, slot: int, name: str) -> SavedSlot:
        answer = await save(http, model, slot, name)
        if slot == 1:
            await talk.say("alpha", "Other ! " + LONG + "And on.", slot=1)
        return answer

    monkeypatch.setattr(RouterHttp, "save", overtaken)
    back = await backend.restore(ALPHA, saved.snapshot, -1, room)
    assert back.displaced is not None
    assert (back.slot, back.displaced.snapshot) == (0, room.name)
    assert await reused(talk, 1, "Other ! " + LONG + "And on.") > 0
    assert (world.slots / room.name).exists()


async def test_what_made_room_in_vain_is_back_in_its_slot(
    backend: Backend, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = await on_disk(backend, talk)
    _, older = await two_others(talk)
    restore = RouterHttp.restore

    async def refused(http: RouterHttp, model: str, slot: int, name: str) -> RestoredSlot:
        if name == saved.snapshot:
            await http.erase(model, slot)  # as the server does with a file that it refuses
            raise BackendRefused("no", 400)
        return await restore(http, model, slot, name)

    monkeypatch.setattr(RouterHttp, "restore", refused)
    with pytest.raises(BackendRefused, match="no"):
        await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh()))
    assert SlotUse(1, older) in (await backend.quiesce(ALPHA)).slots
    assert await reused(talk, 1, "Other ! " + LONG) > 0.9 * older


async def test_what_must_not_be_restored_displaces_nothing(backend: Backend, talk: Talk, world: World) -> None:
    saved = await on_disk(backend, talk)
    await two_others(talk)
    path = world.slots / saved.snapshot
    path.write_bytes(path.read_bytes()[:-1])
    room = Room(fresh())
    with pytest.raises(BackendRefused, match="bytes instead of"):
        await backend.restore(ALPHA, saved.snapshot, -1, room)
    assert not (world.slots / room.name).exists()


async def test_who_asks_for_it_is_told_what_would_leave_and_nothing_is_done_until_that_is_ready(
    backend: Backend, talk: Talk
) -> None:
    saved = await on_disk(backend, talk)
    newer, older = await two_others(talk)
    talks = (Conversation("newer", tokens=newer), Conversation("older", tokens=older))
    with pytest.raises(WouldPushOut) as told:
        await backend.restore(ALPHA, saved.snapshot, -1, Room(fresh(), talks, tells=True))
    assert (told.value.use, told.value.id) == (SlotUse(1, older), "older")
    assert {use.tokens for use in (await backend.quiesce(ALPHA)).slots} == {newer, older}

    await talk.say("alpha", "Other ! " + LONG[:-40], slot=1)  # it is taken back a little, and is the last one used now
    ready = SlotUse(1, (await talk.slot("alpha", 1))["n_prompt_tokens"])
    again = (Conversation("older", tokens=ready.tokens, slot=1), *talks)
    room = Room(fresh(), again, tells=True, takes=ready, strategy="rewind")
    back = await backend.restore(ALPHA, saved.snapshot, -1, room)
    assert back.displaced is not None
    assert (back.slot, back.displaced.id, back.displaced.tokens) == (1, "older", ready.tokens)
    await backend.release(ALPHA, limit_ms=10_000)
    kept = {info.snapshot: info for info in (await backend.load(ALPHA)).snapshots}
    assert kept[room.name].strategy == "rewind"


async def test_what_was_made_ready_and_gone_on_with_since_is_told_anew(backend: Backend, talk: Talk) -> None:
    saved = await on_disk(backend, talk)
    _, older = await two_others(talk)
    await talk.say("alpha", "Other ! " + LONG + " And on.", slot=1)
    room = Room(fresh(), (), tells=True, takes=SlotUse(1, older))
    with pytest.raises(WouldPushOut) as told:
        await backend.restore(ALPHA, saved.snapshot, -1, room)
    assert told.value.use.slot == 0
    await talk.say("alpha", "Other  " + LONG + " And on.", slot=0)  # now that is the one used last
    with pytest.raises(WouldPushOut) as told:
        await backend.restore(ALPHA, saved.snapshot, -1, room)
    assert told.value.use.slot == 1
    assert told.value.use.tokens > older


async def test_of_what_lies_as_it_came_from_disk_nobody_is_told_and_it_is_kept_the_way_it_was(
    backend: Backend, talk: Talk
) -> None:
    await on_disk(backend, talk)
    await two_others(talk)
    kept = [await backend.save(ALPHA, SaveArgs(slot, fresh(), strategy="rewind")) for slot in (0, 1)]
    await backend.release(ALPHA, limit_ms=10_000)
    await backend.load(ALPHA)
    await backend.restore(ALPHA, kept[0].snapshot, 0)
    await talk.say("alpha", "Another. " + LONG, slot=1)
    room = Room(fresh(), tells=True)
    back = await backend.restore(ALPHA, kept[1].snapshot, -1, room)
    assert (back.slot, back.displaced and back.displaced.tokens) == (0, kept[0].tokens)
    await backend.release(ALPHA, limit_ms=10_000)
    told = {info.snapshot: info for info in (await backend.load(ALPHA)).snapshots}
    assert told[room.name].strategy == "rewind"
