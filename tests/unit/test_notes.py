"""Where conversations are, in the state folder: whole again after a restart, for the same load only, and no text."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from swapper.gateway import noted as noted_room
from swapper.gateway.noted import Noted
from swapper.gateway.talks import Talks
from swapper.snapshots.conversation import Conversation, Kept, Place, Relation, Request
from swapper.snapshots.index import Index
from swapper.snapshots.notes import MOST, Note, Notes
from tests.support.wire import settled
from tests.unit.index_doubles import CHAT, OTHER, TENANT, answer, body, chat

BOTH = (TENANT, OTHER)


async def followed(folder: Path) -> tuple[Index, Noted]:
    index = Index()
    noted = Noted(Notes(folder), index)
    await noted.load(BOTH, lambda _tenant, _load: True)
    return index, noted


async def loaded(folder: Path, tenants: Sequence[str] = BOTH, *, load: str = "sw_1") -> Index:
    """What the next process knows, whose servers the swap `load` loaded."""
    index = Index()
    await Noted(Notes(folder), index).load(tenants, lambda _tenant, noted: noted == load)
    return index


async def test_the_next_process_knows_where_each_conversation_is(tmp_path: Path) -> None:
    index, noted = await followed(tmp_path)
    index.loaded(TENANT, "sw_1")
    answer(index, "ab", at=1, slot=0)
    answer(index, "cd", at=2)
    index.stands(TENANT, chat("cd").id, 1)
    index.kept(TENANT, [Kept("e.kv", chat("ef").id, (chat("ef").id,), 900, 3)])
    index.saved(TENANT, chat("ab").id, "a.kv", 7)
    await noted.close()
    again = await loaded(tmp_path)
    assert [replace(talk, request=None) for talk in by_use(index)] == by_use(again)
    assert again.talks(TENANT) == tuple(replace(talk, recallable=False) for talk in index.talks(TENANT))
    assert (again.find(TENANT, chat("cdx")).relation, again.load(TENANT)) == (Relation.EXTENDS, "sw_1")


def by_use(index: Index) -> list[Conversation]:
    return sorted(index.conversations(TENANT), key=lambda talk: talk.used_ms)


async def test_what_was_noted_of_a_server_that_was_loaded_anew_since_counts_for_nothing(tmp_path: Path) -> None:
    index, noted = await followed(tmp_path)
    index.loaded(TENANT, "sw_1")
    answer(index, "ab", slot=0)
    await noted.close()
    again = await loaded(tmp_path, load="sw_2")
    assert (again.conversations(TENANT), again.load(TENANT)) == ((), None)


async def test_what_has_left_the_server_is_noted_there_no_more(tmp_path: Path) -> None:
    index, noted = await followed(tmp_path)
    answer(index, "ab", slot=0)
    await noted.close()
    index.left(TENANT)
    await noted.close()
    assert (await loaded(tmp_path, load="")).conversations(TENANT) == ()


async def test_the_request_that_another_folder_keeps_and_the_place_that_is_noted_come_together(tmp_path: Path) -> None:
    index, noted = await followed(tmp_path)
    answer(index, "ab", slot=1, at=4)
    await noted.close()
    again = Index()
    again.remembered(TENANT, chat("ab"), Request(CHAT, body("ab")), 5, 4)
    await Noted(Notes(tmp_path), again).load(BOTH, lambda _tenant, _load: True)
    (talk,) = again.conversations(TENANT)
    assert talk.request is not None
    assert (talk.place, talk.slot, talk.tokens, again.bytes) == (Place.SERVER, 1, 2_099, len(body("ab")))


async def test_a_note_is_for_us_alone_and_has_no_word_of_what_was_said(tmp_path: Path) -> None:
    index, noted = await followed(tmp_path / "notes")
    answer(index, "ab")
    await noted.close()
    (file,) = (tmp_path / "notes").iterdir()
    assert ((tmp_path / "notes").stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert b"aaaa" not in file.read_bytes()
    assert b"terse" not in file.read_bytes()
    assert base64.b64encode(body("ab"))[:99] not in file.read_bytes()


async def test_what_is_cut_of_another_tenant_or_half_written_goes_and_nothing_else(tmp_path: Path) -> None:
    for tenant in BOTH:
        index, noted = await followed(tmp_path)
        answer(index, "ab", tenant=tenant)
        await noted.close()
    (tmp_path / "x.tmp").write_text("{")
    (tmp_path / "mine.txt").write_text("not ours")
    again = await loaded(tmp_path, [OTHER], load="")
    assert [len(again.conversations(tenant)) for tenant in BOTH] == [0, 1]
    (other,) = (path for path in tmp_path.iterdir() if path.suffix == ".json")
    other.write_bytes(other.read_bytes()[:-9])
    assert (await loaded(tmp_path, load="")).conversations(OTHER) == ()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


async def test_a_note_that_cannot_be_read_costs_none_of_the_others(tmp_path: Path) -> None:
    for tenant in BOTH:
        index, noted = await followed(tmp_path)
        answer(index, "ab", tenant=tenant)
        await noted.close()
    first, _ = sorted(tmp_path.iterdir())
    first.unlink()
    first.mkdir()
    again = await loaded(tmp_path, load="")
    assert sorted(len(again.conversations(tenant)) for tenant in BOTH) == [0, 1]


async def test_a_note_is_bounded_in_conversations_and_in_links(tmp_path: Path) -> None:
    index, noted = await followed(tmp_path)
    for at in range(MOST + 5):
        index.answered(TENANT, chat(chr(0x4E00 + at)), None, 0, 9, 1, None, at)
    index.answered(TENANT, chat("z" * (MOST + 50)), None, 0, 9, 1, None, 10_000)
    await noted.close()
    again = await loaded(tmp_path, load="")
    assert len(again.conversations(TENANT)) == MOST
    assert again.find(TENANT, chat("z" * (MOST + 51))).relation is Relation.EXTENDS
    assert max(len(talk.links) for talk in again.conversations(TENANT)) == MOST


async def test_a_disk_that_refuses_costs_a_warning_and_the_next_change_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, noted = await followed(tmp_path)
    write = Notes.write

    def full(_notes: Notes, _note: Note) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Notes, "write", full)
    with capture_logs() as logs:
        for letters in ("ab", "cd"):
            answer(index, letters)
            await noted.close()
    assert [line["reason"] for line in logs] == ["No space left on device"]
    monkeypatch.setattr(Notes, "write", write)
    answer(index, "ef")
    await noted.close()
    assert len((await loaded(tmp_path, load="")).conversations(TENANT)) == 3


async def test_who_ends_has_noted_what_was_answered_last(tmp_path: Path) -> None:
    index, noted = await followed(tmp_path)

    async def send(_report: object) -> None:
        raise AssertionError("nothing is told")

    talks = Talks("gateway:g1", send, lambda: 0, index=index)
    talks.keep_in(None, noted)
    answer(index, "ab")
    await talks.close()
    assert len((await loaded(tmp_path, load="")).conversations(TENANT)) == 1


async def test_where_changes_come_by_the_hundred_they_wait_for_each_other_and_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noted_room, "AT_ONCE", 3)
    monkeypatch.setattr(noted_room, "A_SECOND", 1e-9)
    written: list[int] = []
    write = Notes.write

    async def at_once(work: Callable[..., None], *args: object) -> None:
        work(*args)

    def counted(notes: Notes, note: Note) -> None:
        write(notes, note)
        written.append(len(note.talks))

    monkeypatch.setattr(Notes, "write", counted)
    index, noted = await followed(tmp_path)
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    for number in range(10):
        answer(index, f"{number}x")
        await settled(lambda: len(written))
    await noted.close()
    assert written == [1, 2, 3, 4, 10]
