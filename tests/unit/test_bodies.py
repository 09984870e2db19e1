"""Requests kept in the state folder come back as they were, or not at all, and nobody else reads them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from swapper.snapshots.bodies import Bodies
from swapper.snapshots.conversation import Conversation, Links, Request
from swapper.snapshots.index import Index, Limits
from tests.unit.index_doubles import CHAT, OTHER, TENANT, answer, body, chat

ROOM = 1 << 20
SPOILS: list[Callable[[bytes], bytes]] = [
    lambda data: data[:-1],
    lambda data: data[:-1] + b"?",
    lambda data: data + b"?",
    lambda data: data[:10],
    lambda data: b"",
    lambda data: b"\xff" + data,
    lambda data: data.replace(b"llama/alpha", b"llama/gamma"),
]


def talk(letters: str, used_ms: int = 0) -> Conversation:
    return Conversation(Links.of(chat(letters)), used_ms, tokens=7, request=Request(CHAT, body(letters)))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def loaded(bodies: Bodies) -> list[tuple[str, str]]:
    return [(one.tenant, one.id) for one in bodies.load()]


def test_what_was_written_comes_back_oldest_first_as_it_was(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "requests", ROOM)
    bodies.write(TENANT, talk("abc", used_ms=2))
    bodies.write(OTHER, talk("abc", used_ms=1))
    other, ours = Bodies(tmp_path / "requests", ROOM).load()
    assert (other.tenant, ours.tenant) == (OTHER, TENANT)
    assert (ours.id, ours.tokens, ours.used_ms) == (chat("abc").id, 7, 2)
    assert ours.request == Request(CHAT, body("abc"))


def test_only_the_owner_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Bodies(tmp_path / "requests", ROOM).write(TENANT, talk("abc"))
    finally:
        os.umask(before)
    assert mode(tmp_path / "requests") == 0o700
    assert [mode(path) for path in (tmp_path / "requests").iterdir()] == [0o600]


def test_a_request_that_is_removed_is_gone_and_one_that_is_not_there_too(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path, ROOM)
    bodies.write(TENANT, talk("abc"))
    bodies.remove(TENANT, talk("abc").id)
    bodies.remove(TENANT, talk("abc").id)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_where_nothing_is_kept(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "requests", ROOM)
    bodies.write(TENANT, Conversation(Links.of(chat("abc")), 0))
    assert loaded(bodies) == []
    assert not (tmp_path / "requests").exists()


def test_beyond_the_budget_the_oldest_files_go(tmp_path: Path) -> None:
    for used_ms, letters in enumerate(("abc", "mno", "xyz")):
        Bodies(tmp_path, ROOM).write(TENANT, talk(letters, used_ms))
    small = Bodies(tmp_path, 2 * len(body("abc")))
    assert loaded(small) == [(TENANT, chat("mno").id), (TENANT, chat("xyz").id)]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_file_that_is_not_as_it_was_written_is_removed(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    bodies = Bodies(tmp_path, ROOM)
    bodies.write(TENANT, talk("abc"))
    bodies.write(TENANT, talk("xyz"))
    path = next(path for path in tmp_path.iterdir() if path.name.startswith(chat("abc").id))
    path.write_bytes(spoil(path.read_bytes()))
    assert loaded(bodies) == [(TENANT, chat("xyz").id)]
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_left_half_written_is_removed_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path, ROOM)
    bodies.write(TENANT, talk("abc"))
    (tmp_path / "half.tmp").write_bytes(b"{")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    assert len(loaded(bodies)) == 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".request", ".txt"}


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path, ROOM)
    bodies.write(TENANT, talk("abc"))
    path = next(tmp_path.iterdir())
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        bodies.write(TENANT, talk("abc"))
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_follows_the_index(tmp_path: Path) -> None:
    bodies, index = Bodies(tmp_path, ROOM), Index(Limits(conversations=2), followed=True)
    for letters in ("abc", "xyz", "abcde", "mno"):
        answer(index, letters)
        for tenant, name, changed in index.changes():
            if changed is None:
                bodies.remove(tenant, name)
            else:
                bodies.write(tenant, changed)
    assert {name for _, name in loaded(bodies)} == {chat("abcde").id, chat("mno").id}
