"""A snapshot that must not be restored is told of in one run, then passed over; it stays, and may come back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from swapper.snapshots.manifest import Fingerprint, GgufIdentity, Manifest
from workers.llama import refused
from workers.llama.keeping import LISTED, Keeper
from workers.llama.refused import NOTE_SUFFIX
from workers.llama.slots import Keep, SlotFolder

MED = "llama/med"
NOW = Fingerprint("med", GgufIdentity("/m/med.gguf", "abc", 10, 5), "b1", 4096, 2, False)
UPGRADED = replace(NOW, build="b2")
BUILD = "saved under another llama-server build (b1, now b2)"
DAMAGE = "its file was damaged since the save (the digest differs)"


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


@pytest.fixture
async def keeper(folder: SlotFolder) -> AsyncIterator[Keeper]:
    keeper = Keeper(folder, Keep(), lambda: 1)
    yield keeper
    await keeper.close()


def snapshot(folder: SlotFolder, name: str) -> Manifest:
    (folder.path / name).write_bytes(bytes(100))
    manifest = Manifest(name, MED, NOW, 0, 50, 100, 1, boot=folder.boot)
    folder.seal(manifest)
    folder.settle(manifest)
    settled = folder.manifest(name)
    assert settled is not None
    return settled


def damage(folder: SlotFolder, name: str) -> None:
    (folder.path / name).write_bytes(bytes(99) + b"\1")


async def listed(keeper: Keeper, run: str, now: Fingerprint = NOW) -> dict[str, str | None]:
    return {info.snapshot: info.refused for info in await keeper.listing(MED, now, run)}


async def test_a_refused_snapshot_is_listed_in_its_first_run_only_and_stays(keeper: Keeper, folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    for _ in range(2):  # a load may be asked for twice
        assert await listed(keeper, "1", UPGRADED) == {"a.kv": BUILD}
    assert await listed(keeper, "2", UPGRADED) == {}
    assert folder.size("a.kv") == 100
    assert [manifest.snapshot for manifest in folder.manifests(MED)] == ["a.kv"]


async def test_of_very_many_refused_ones_a_load_tells_the_newest_and_how_many_more_there_are(
    keeper: Keeper, folder: SlotFolder
) -> None:
    count, most = 2 * LISTED + 3, LISTED
    for n in range(count):
        name = f"{n:04}.kv"
        folder.write(Manifest(name, MED, NOW, 0, 50, 100, n, boot=folder.boot))
    snapshot(folder, "good.kv")
    newest_first = [f"{n:04}.kv" for n in reversed(range(count))]

    def more(left: int) -> dict[str, str | None]:
        why = f"{left} more must not be restored; later loads tell of each, {most} at a time"
        return {f"llama/med: {left} more": why}

    gone = dict.fromkeys(newest_first, "its file is gone")
    for _ in range(2):
        seen = await listed(keeper, "1")
        assert seen == {n: gone[n] for n in newest_first[:most]} | {"good.kv": None} | more(count - most)
        assert next(iter(seen)) == newest_first[0]
    assert len(list(folder.path.glob("*" + NOTE_SUFFIX))) == most
    second = newest_first[most : 2 * most]
    assert await listed(keeper, "2") == {n: gone[n] for n in second} | {"good.kv": None} | more(3)
    assert await listed(keeper, "3") == {n: gone[n] for n in newest_first[2 * most :]} | {"good.kv": None}
    assert await listed(keeper, "4") == {"good.kv": None}


@pytest.mark.parametrize("slots", [2, LISTED + 1])
async def test_no_more_snapshots_are_offered_than_there_can_be_room_for(
    keeper: Keeper, folder: SlotFolder, slots: int
) -> None:
    now = replace(NOW, n_parallel=slots)
    for n in range(LISTED + 2):
        (folder.path / f"{n:04}.kv").write_bytes(bytes(100))
        folder.write(Manifest(f"{n:04}.kv", MED, now, 0, 50, 100, n, boot=folder.boot))
    offered = [f"{n:04}.kv" for n in reversed(range(LISTED + 2))][: max(LISTED, slots)]
    assert list(await listed(keeper, "1", now)) == offered


async def test_what_was_told_is_known_after_a_restart(keeper: Keeper, folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    await listed(keeper, "1", UPGRADED)
    later = Keeper(SlotFolder(folder.path), Keep(), lambda: 1)
    assert await listed(later, "1", UPGRADED) == {"a.kv": BUILD}
    assert await listed(later, "2", UPGRADED) == {}


async def test_a_refused_snapshot_is_offered_again_when_the_reason_is_gone(keeper: Keeper, folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    for run in ("1", "2"):
        await listed(keeper, run, UPGRADED)
    assert await listed(keeper, "3") == {"a.kv": None}


async def test_a_snapshot_is_told_of_again_for_another_reason(keeper: Keeper, folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    await listed(keeper, "1", UPGRADED)
    (folder.path / "a.kv").unlink()
    assert await listed(keeper, "2", UPGRADED) == {"a.kv": "its file is gone"}
    assert await listed(keeper, "3", UPGRADED) == {}


async def test_a_damaged_snapshot_is_offered_until_its_restore_was_refused_and_not_again(
    keeper: Keeper, folder: SlotFolder
) -> None:
    manifest = snapshot(folder, "a.kv")
    damage(folder, "a.kv")
    assert await listed(keeper, "1") == {"a.kv": None}
    assert await keeper.problem(manifest, NOW, "1") == DAMAGE
    assert await listed(keeper, "2") == {}
    assert await listed(keeper, "1") == {"a.kv": DAMAGE}
    assert await listed(Keeper(SlotFolder(folder.path), Keep(), lambda: 1), "2") == {}
    assert folder.size("a.kv") == 100


async def test_damage_that_was_found_before_the_listing_is_told_there(keeper: Keeper, folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    damage(folder, "a.kv")
    await keeper.read_ahead(MED)
    await keeper.close()
    assert await listed(keeper, "1") == {"a.kv": DAMAGE}
    assert await listed(keeper, "2") == {}


async def test_a_damaged_file_that_was_put_right_is_looked_at_again(keeper: Keeper, folder: SlotFolder) -> None:
    manifest = snapshot(folder, "a.kv")
    damage(folder, "a.kv")
    await keeper.problem(manifest, NOW, "1")
    (folder.path / "backup").write_bytes(bytes(100))
    (folder.path / "backup").replace(folder.path / "a.kv")
    assert await listed(keeper, "2") == {"a.kv": None}
    assert await keeper.problem(manifest, NOW, "2") is None


async def test_a_note_goes_with_its_snapshot_and_with_a_new_save_of_its_name(
    keeper: Keeper, folder: SlotFolder
) -> None:
    for name in ("a.kv", "b.kv"):
        snapshot(folder, name)
    await listed(keeper, "1", UPGRADED)
    assert len(list(folder.path.glob("*" + NOTE_SUFFIX))) == 2
    folder.remove("a.kv")
    folder.forget("b.kv")
    assert [path.name for path in folder.path.iterdir()] == ["b.kv"]


async def test_without_a_note_that_can_be_read_or_written_it_is_told_once_more(
    keeper: Keeper, folder: SlotFolder
) -> None:
    for name in ("torn.kv", "taken.kv"):
        snapshot(folder, name)
    (folder.path / ("torn.kv" + NOTE_SUFFIX)).write_text("{")
    os.mkfifo(folder.path / ("taken.kv" + NOTE_SUFFIX))
    assert await listed(keeper, "1", UPGRADED) == {"torn.kv": BUILD, "taken.kv": BUILD}
    assert await listed(keeper, "2", UPGRADED) == {"taken.kv": BUILD}


async def test_a_refusal_is_in_the_log_once_with_its_reason(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(refused, "_log", said)
    snapshot(folder, "a.kv")
    for run in ("1", "1", "2"):
        await listed(keeper, run, UPGRADED)
    assert [call.kwargs for call in said.calls] == [{"snapshot": "a.kv", "why": BUILD}]
