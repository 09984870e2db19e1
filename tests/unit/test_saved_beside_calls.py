"""What a gateway knows of a conversation that was saved while it stayed in the server."""

from __future__ import annotations

import asyncio

import pytest

from swapper.core.periodic import PASSED, SAVED, TALKS
from swapper.core.steps import PLACED
from swapper.gateway import bring
from swapper.snapshots.conversation import Kept, Place, Talk
from swapper.snapshots.index import Index
from tests.unit.gateway_doubles import ALPHA, serve
from tests.unit.gateway_doubles import answer as answered
from tests.unit.index_doubles import TENANT, answer, chat
from tests.unit.test_talks import TURN_2, body, figures, say, talked


def one(index: Index) -> Talk:
    (talk,) = index.talks(TENANT)
    return talk


def saved(index: Index, letters: str, snapshot: str, at: int = 50) -> None:
    index.saved(TENANT, chat(letters).id, snapshot, at)


def test_it_is_untouched_until_it_is_used_and_its_snapshot_is_what_the_next_one_replaces() -> None:
    index = Index()
    answer(index, "abc", at=1)
    assert (one(index).snapshot, one(index).restored) == ("", False)
    saved(index, "abc", "p1.kv")
    assert (one(index).snapshot, one(index).saved_ms, one(index).restored) == ("p1.kv", 50, True)
    answer(index, "abcde", at=60)
    assert (one(index).snapshot, one(index).saved_ms, one(index).restored) == ("p1.kv", 50, False)
    saved(index, "abcde", "p2.kv", 70)
    assert (one(index).snapshot, one(index).saved_ms, one(index).restored) == ("p2.kv", 70, True)


def test_one_that_went_on_while_it_was_saved_has_the_snapshot_and_is_not_untouched() -> None:
    index = Index()
    answer(index, "abc", at=1)
    answer(index, "abcde", at=2)
    saved(index, "abc", "p1.kv")
    assert (one(index).id, one(index).snapshot, one(index).restored) == (chat("abcde").id, "p1.kv", False)


def came_back(index: Index, letters: str, snapshot: str) -> None:
    """Restored from disk, of what another gateway saw."""
    told = chat(letters).id
    index.stored(TENANT, Kept(snapshot, told, (told,), 40))
    index.placed(TENANT, told, 0)


def test_what_another_gateway_has_gone_on_from_and_saved_is_no_conversation_any_more() -> None:
    index = Index()
    came_back(index, "abc", "p1.kv")
    index.saved(TENANT, chat("xyz").id, "p2.kv", 50, "other.kv")
    assert one(index).snapshot == "p1.kv"
    index.saved(TENANT, chat("xyz").id, "p2.kv", 50, "p1.kv")
    assert index.talks(TENANT) == ()


def test_one_whose_text_is_kept_stays_and_has_no_snapshot_any_more() -> None:
    index = Index()
    came_back(index, "abc", "p1.kv")
    answer(index, "abcde", at=60)
    assert one(index).snapshot == "p1.kv"
    index.saved(TENANT, chat("xyz").id, "p2.kv", 50, "p1.kv")
    assert (one(index).id, one(index).snapshot) == (chat("abcde").id, "")


def test_one_that_branched_off_has_a_snapshot_of_its_own() -> None:
    index = Index()
    answer(index, "abcde", at=1)
    saved(index, "abcde", "p1.kv")
    answer(index, "aXY", at=2)
    assert [talk.snapshot for talk in index.talks(TENANT)] == ["", "p1.kv"]


def test_something_is_to_be_saved_as_long_as_what_stands_in_a_slot_has_no_snapshot_as_it_is() -> None:
    index = Index()
    assert index.unsaved() == ()
    answer(index, "abc", at=1, slot=0)
    assert index.unsaved() == (TENANT,)
    saved(index, "abc", "p1.kv")
    assert index.unsaved() == ()
    answer(index, "abcde", at=60, slot=0)
    assert index.unsaved() == (TENANT,)
    saved(index, "abcde", "p2.kv", 70)
    index.recalled(TENANT, chat("abcde").id, 900, 1, 0)
    assert index.unsaved() == (TENANT,)
    index.left(TENANT)
    assert index.unsaved() == ()


def test_what_another_took_the_slot_of_can_be_saved_by_nobody_until_it_stands_in_one_again() -> None:
    index = Index()
    answer(index, "abc", at=1, slot=0)
    answer(index, "xyz", at=2, slot=0)
    saved(index, "xyz", "p1.kv")
    assert index.unsaved() == ()
    index.stands(TENANT, chat("abc").id, 1)
    assert index.unsaved() == (TENANT,)


def test_one_whose_slot_nobody_knows_may_stand_in_one_until_it_was_passed_over_and_again_once_it_was_used() -> None:
    index = Index()
    answer(index, "abc", at=1)
    assert index.unsaved() == (TENANT,)
    index.passed(TENANT, [chat("abc").id, "f" * 32])
    assert index.unsaved() == ()
    answer(index, "abcde", at=2)
    assert index.unsaved() == (TENANT,)


def test_a_rewind_is_a_change_until_that_is_saved() -> None:
    index = Index()
    answer(index, "abc", at=1)
    saved(index, "abc", "p1.kv")
    index.recalled(TENANT, chat("abc").id, 2_000, 900, 0)
    assert not one(index).restored
    saved(index, "abc", "p2.kv")
    assert (one(index).tokens, one(index).restored) == (2_900, True)


def test_what_comes_back_from_it_after_a_crash_counts_as_restored_and_what_is_read_again_as_swapped() -> None:
    index = Index()
    answer(index, "abc", at=1)
    saved(index, "abc", "p1.kv")
    answer(index, "abcde", at=60)
    index.left(TENANT)
    links = tuple(link.hex() for link in chat("abc").links[-8:])
    index.kept(TENANT, [Kept("p1.kv", links[-1], links, 3_000)])
    index.placed(TENANT, links[-1], 1)
    talk = one(index)
    assert (talk.id, talk.snapshot, talk.saved_ms, talk.restored) == (chat("abcde").id, "p1.kv", 0, True)
    (known,) = index.conversations(TENANT)
    assert (known.place, known.slot) == (Place.SERVER, 1)


async def test_the_gateway_tells_what_it_knows_and_its_gate_stays_open() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        report = await say(gateway, TALKS, 1)
        (told,) = report.data["talks"]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        assert (told["id"], told["tokens"]) == (name, 2_000)
        assert gateway.admission.gate(ALPHA).open
        await say(gateway, SAVED, 2, snapshot="p1.kv", id=name, ms=5)
        report = await say(gateway, TALKS, 3)
        (told,) = report.data["talks"]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        assert (told["snapshot"], told["saved_ms"], told["restored"]) == ("p1.kv", 5, True)


async def test_with_its_beat_it_says_that_there_is_something_to_save_and_that_there_is_nothing_any_more() -> None:
    async with serve() as gateway:
        name = await talked(gateway)
        rows = await gateway.link.beaten(lambda demand: any(record.unsaved for record in demand))
        (row,) = (row for row in rows if row.unsaved)
        assert (row.tenant, row.waiting, row.running, row.unsaved) == (ALPHA, 0, 0, True)
        await say(gateway, SAVED, 1, snapshot="p1.kv", id=name, ms=5)
        await gateway.link.beaten(lambda demand: not any(record.unsaved for record in demand))
        gateway.upstream.scripts = [answered(figures(2_000, 20))]
        await gateway.call(body(TURN_2))
        await gateway.link.beaten(lambda demand: any(record.unsaved for record in demand))
        (talk,) = gateway.member.talks.index.talks(ALPHA)
        await say(gateway, PASSED, 2, ids=[talk.id])
        await gateway.link.beaten(lambda demand: not any(record.unsaved for record in demand))


async def test_a_conversation_asked_for_while_something_short_goes_on_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bring, "AGAIN_S", 0)
    async with serve() as gateway:
        name = await talked(gateway)
        gateway.member.talks.index.stored(ALPHA, Kept("a.kv", name, (), 2_000))
        gateway.upstream.scripts = [answered(figures(2_000, 20))]
        async with asyncio.TaskGroup() as group:
            call = group.create_task(gateway.call(body(TURN_2)))
            for again in (True, False):
                while (report := await gateway.link.reports.get()).verb != "wanted":
                    pass
                assert report.data["snapshot"] == "a.kv"
                await say(gateway, PLACED, 2 - again, snapshot="a.kv", ok=not again, slot=1, tokens=2_000, again=again)
        assert call.result().status == 200
        (talk,) = gateway.member.talks.index.conversations(ALPHA)
        assert talk.place is Place.SERVER
