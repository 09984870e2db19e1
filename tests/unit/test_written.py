"""Requests on disk: known again after a start, written behind the answers, and a disk that refuses costs no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from swapper.gateway.written import Written
from swapper.snapshots.bodies import Bodies
from swapper.snapshots.conversation import Conversation, Place
from swapper.snapshots.index import Index, Limits
from tests.unit.gateway_doubles import ALPHA, CHAT, serve
from tests.unit.index_doubles import OTHER, TENANT, answer, body

BOTH = frozenset({TENANT, OTHER})


def written(folder: Path, index: Index, tenants: frozenset[str] = BOTH) -> Written:
    return Written(Bodies(folder, index.limits.bytes), index, tenants)


async def loaded(folder: Path, tenants: frozenset[str] = BOTH, limits: Limits | None = None) -> Index:
    """What the next process knows."""
    index = Index(limits, followed=True)
    await written(folder, index, tenants).load()
    return index


async def test_what_one_process_was_asked_the_next_one_knows(tmp_path: Path) -> None:
    index = Index(followed=True)
    keeping = written(tmp_path, index)
    answer(index, "ab", at=1)
    answer(index, "cd", at=2, tenant=OTHER)
    await keeping.close()
    again = await loaded(tmp_path)
    (talk,) = again.conversations(TENANT)
    assert talk.request is not None
    assert (talk.request.body, talk.used_ms, talk.place) == (body("ab"), 1, Place.COLD)
    assert talk.tokens == index.talks(TENANT)[0].tokens
    assert len(again.conversations(OTHER)) == 1


async def test_a_conversation_that_went_on_leaves_its_earlier_request_behind_nowhere(tmp_path: Path) -> None:
    index = Index(followed=True)
    keeping = written(tmp_path, index)
    answer(index, "ab")
    answer(index, "abc")
    keeping.due()
    answer(index, "abcde")
    await keeping.close()
    (kept,) = tmp_path.iterdir()
    assert body("abcde") in kept.read_bytes()


async def test_what_is_not_to_be_kept_on_disk_any_more_goes_at_the_next_start(tmp_path: Path) -> None:
    index = Index(followed=True)
    answer(index, "ab")
    answer(index, "cd", tenant=OTHER)
    await written(tmp_path, index).close()
    again = await loaded(tmp_path, frozenset({OTHER}))
    assert (len(again.conversations(TENANT)), len(again.conversations(OTHER))) == (0, 1)
    assert len(list(tmp_path.iterdir())) == 1


async def test_what_a_tenant_that_is_not_kept_on_disk_was_asked_is_never_written(tmp_path: Path) -> None:
    index = Index(followed=True)
    keeping = written(tmp_path, index, frozenset({OTHER}))
    answer(index, "ab")
    await keeping.close()
    assert list(tmp_path.iterdir()) == []


async def test_what_a_smaller_index_has_no_room_for_goes_from_the_disk_too(tmp_path: Path) -> None:
    index = Index(followed=True)
    for at, letters in enumerate(("ab", "cd", "ef")):
        answer(index, letters, at=at)
    await written(tmp_path, index).close()
    again = await loaded(tmp_path, limits=Limits(conversations=2))
    assert [talk.used_ms for talk in again.conversations(TENANT)] == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


async def test_a_disk_that_refuses_is_told_once_and_later_what_changes_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(followed=True)
    keeping = written(tmp_path, index)
    write = Bodies.write

    def full(_self: Bodies, _tenant: str, _talk: Conversation) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Bodies, "write", full)
    answer(index, "ab")
    answer(index, "cd")
    with capture_logs() as logs:
        await keeping.close()
    assert [line["reason"] for line in logs] == ["No space left on device"]
    monkeypatch.setattr(Bodies, "write", write)
    answer(index, "ef")
    await keeping.close()
    assert len(list(tmp_path.iterdir())) == 1


async def test_an_answered_call_is_on_disk_soon_and_its_answer_does_not_wait_for_that(tmp_path: Path) -> None:
    async with serve() as gateway:
        index = Index(followed=True)
        talks = gateway.member.talks
        talks.index = index
        talks.keep_in(written(tmp_path, index, frozenset({ALPHA})))
        over = asyncio.Event()
        gateway.ctx.told = lambda _tenant, _code, _waited_ms: over.set()
        await gateway.call(CHAT)
        await over.wait()
    (kept,) = tmp_path.iterdir()
    assert b'"content": "hi"' in kept.read_bytes()
