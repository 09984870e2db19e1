"""Which copies of conversations stay: the last one of each, by age alone, and no older one beside it for long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from swapper.snapshots.manifest import Fingerprint, GgufIdentity, Manifest
from workers.llama import keeping, slots
from workers.llama.keeping import Keeper
from workers.llama.retention import REREAD, holds, went_on
from workers.llama.slots import Keep, SlotFolder

LFM = "llama/lfm"
NOW = Fingerprint("lfm", GgufIdentity("/m/lfm.gguf", "abc", 10, 5), "b1", 4096, 2, False)
OLD = Manifest(
    "old.kv", LFM, NOW, 0, 500, 100, 10, digest="d", id="2", links=("1", "2"), used_ms=9, strategy="rewind", token=1
)
NEW = replace(
    OLD, snapshot="new.kv", tokens=700, saved_ms=20, used_ms=19, id="4", links=("1", "2", "3", "4"), token=2
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


@pytest.fixture
async def keeper(folder: SlotFolder, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(keeping, "SETTLE_S", 0.0)
    keeper = Keeper(folder, Keep(), lambda: 1_000)
    yield keeper
    await keeper.close()


def put(folder: SlotFolder, manifest: Manifest) -> Manifest:
    (folder.path / manifest.snapshot).write_bytes(bytes(manifest.bytes))
    folder.seal(replace(manifest, boot=folder.boot))
    return manifest


async def save(keeper: Keeper, name: str, talk: str, turn: int, *, saved_ms: int, restored: str | None = None) -> None:
    """One turn is two links: what was asked, and what was answered."""
    links = tuple(f"{talk}{n}" for n in range(2 * turn))[-8:]
    await keeper.begin(LFM, name)
    (keeper.folder.path / name).write_bytes(bytes(100))
    manifest = replace(OLD, snapshot=name, digest=None, boot=keeper.folder.boot, saved_ms=saved_ms, used_ms=saved_ms)
    manifest = replace(manifest, id=links[-1], links=links, tokens=500 + turn, token=saved_ms)
    await keeper.finish(manifest, restored=restored)


def there(folder: SlotFolder) -> set[str]:
    return {manifest.snapshot for manifest in folder.manifests()}


def test_what_goes_on_from_a_copy_holds_it_once_it_is_on_the_disk() -> None:
    assert holds(NEW, OLD)
    assert not holds(replace(NEW, digest=None), OLD)


@pytest.mark.parametrize(
    "other",
    [
        replace(NEW, id="3b", links=("1", "3b")),  # a branch
        replace(NEW, tenant="llama/med"),
        replace(NEW, used_ms=5),  # somebody has gone back to the older state since
        replace(NEW, saved_ms=5),
        replace(NEW, strategy="slots"),  # a hybrid model goes on from that in one way only
        replace(NEW, tokens=OLD.tokens - REREAD - 1),
        replace(NEW, fingerprint=replace(NOW, build="b2")),
    ],
    ids=["branch", "tenant", "used-before", "saved-before", "not-rewound", "shorter", "build"],
)
def test_a_copy_that_does_not_hold_all_of_another_or_not_for_every_use_does_not_replace_it(other: Manifest) -> None:
    assert not holds(other, OLD)


def test_a_copy_taken_back_to_its_request_replaces_one_that_was_not() -> None:
    assert holds(NEW, replace(OLD, strategy="slots"))


def test_the_newer_of_two_copies_of_one_state_holds_the_other() -> None:
    again = replace(OLD, snapshot="again.kv", saved_ms=11)
    assert holds(again, OLD)
    assert not holds(OLD, again)


def test_an_older_copy_goes_as_soon_as_a_newer_one_is_on_the_disk_and_none_of_a_branch(folder: SlotFolder) -> None:
    put(folder, OLD)
    put(folder, replace(OLD, snapshot="branch.kv", id="2b", links=("1", "2b"), used_ms=8))
    put(folder, replace(NEW, digest=None))
    assert folder.prune(Keep(), 1_000) == []
    put(folder, NEW)
    assert [(r.snapshot, r.why) for r in folder.prune(Keep(), 1_000)] == [("old.kv", "new.kv holds its conversation")]
    assert there(folder) == {"new.kv", "branch.kv"}


def test_a_newer_copy_that_is_damaged_replaces_nothing(folder: SlotFolder) -> None:
    put(folder, OLD)
    put(folder, NEW)
    (folder.path / "new.kv").write_bytes(bytes(99))
    assert folder.prune(Keep(), 1_000) == []


def test_the_budget_takes_no_conversation_that_stayed_on_disk_over_a_second_swap(folder: SlotFolder) -> None:
    put(folder, replace(OLD, snapshot="a.kv", id="a", links=("a",), token=1))
    put(folder, replace(OLD, snapshot="b.kv", id="b", links=("b",), token=1, restored_ms=11))  # its server died since
    put(folder, replace(OLD, snapshot="nobodys.kv", id="", links=(), token=1))
    put(folder, replace(NEW, snapshot="c.kv", id="c", links=("c",), token=2))
    put(folder, replace(NEW, snapshot="d.kv", id="d", links=("d",), token=2))
    gone = folder.prune(Keep(bytes=0), 1_000, copies={"d.kv"})
    assert {r.snapshot for r in gone} == {"nobodys.kv", "d.kv"}
    assert {r.lost for r in gone} == {None}
    assert there(folder) == {"a.kv", "b.kv", "c.kv"}


def test_the_budget_takes_an_older_copy_only_where_a_newer_one_is_on_the_disk(folder: SlotFolder) -> None:
    put(folder, OLD)
    put(folder, replace(NEW, digest=None, strategy="slots"))
    assert folder.prune(Keep(bytes=0), 1_000) == []
    put(folder, replace(NEW, strategy="slots"))
    assert [r.snapshot for r in folder.prune(Keep(bytes=0), 1_000)] == ["old.kv"]


def test_that_all_beyond_the_budget_may_be_the_only_copies_is_said_once(
    folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(slots, "_log", said)
    put(folder, OLD)
    for _ in range(2):
        folder.prune(Keep(bytes=0), 1_000)
    (call,) = said.calls
    assert "beyond the budget of 0 MiB, and each may be the only copy" in call.args[0]
    assert "raise snapshots.budget" in call.args[0]


async def test_what_makes_room_turn_by_turn_leaves_one_file_a_conversation(keeper: Keeper, folder: SlotFolder) -> None:
    for turn in range(1, 13):
        for talk in "abcd":
            name = f"{talk}.{turn}.kv"
            await save(keeper, name, talk, turn, saved_ms=turn * 10 + ord(talk) - ord("a"))
            keeper.replace_soon(LFM, name, beside=False)
        await keeper.close()
        assert there(folder) == {f"{talk}.{turn}.kv" for talk in "abcd"}


async def test_of_a_new_copy_that_does_not_get_to_the_disk_the_older_one_stays(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(keeper, "a1.kv", "a", 1, saved_ms=1)
    await keeper.close()

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "settle", full)
    await save(keeper, "a2.kv", "a", 2, saved_ms=2, restored="a1.kv")
    keeper.replace_soon(LFM, "a2.kv", beside=False)
    await keeper.close()
    await keeper.prune()
    assert there(folder) == {"a1.kv", "a2.kv"}


async def test_the_budget_counts_what_came_back_as_in_the_server_until_that_is_loaded_anew(folder: SlotFolder) -> None:
    keeper = Keeper(folder, Keep(bytes=0), lambda: 1_000)
    put(folder, replace(OLD, snapshot="a.kv", id="a", links=("a",)))
    put(folder, replace(OLD, snapshot="b.kv", id="b", links=("b",)))
    await keeper.restored("a.kv")
    await keeper.read_ahead(LFM)
    assert await keeper.prune() == []
    await keeper.restored("b.kv")
    assert [removed.snapshot for removed in await keeper.prune()] == ["b.kv"]
    await keeper.close()


async def test_a_last_copy_that_goes_by_age_is_told_once_at_the_next_load(folder: SlotFolder) -> None:
    keeper = Keeper(folder, Keep(age_ms=500), lambda: 1_000)
    put(folder, replace(OLD, restored_ms=11))
    put(folder, replace(NEW, saved_ms=400, tokens=800))
    put(folder, replace(NEW, snapshot="stays.kv", saved_ms=900, id="9", links=("9",)))
    keeper.tidy(LFM)
    (stays, lost) = await keeper.listing(LFM, NOW, "1")
    assert (stays.snapshot, stays.refused) == ("stays.kv", None)
    assert (lost.snapshot, lost.tokens, lost.refused) == ("new.kv", 800, "deleted: older than 0.0001389 h")
    assert [info.snapshot for info in await keeper.listing(LFM, NOW, "2")] == ["stays.kv"]
    await keeper.close()


@pytest.mark.parametrize(
    ("old_id", "new_id", "links", "same"),
    [("2", "4", ("2", "4"), True), ("2", "9", ("8", "9"), False), ("2", "", (), False), ("", "9", ("9",), True),
     ("", "", (), True)],
)  # fmt: skip
def test_who_took_the_slot_of_a_conversation_that_is_known_is_known_to_be_a_stranger(
    old_id: str, new_id: str, links: tuple[str, ...], same: bool
) -> None:
    assert went_on(replace(OLD, id=old_id), replace(NEW, id=new_id, links=links)) is same
