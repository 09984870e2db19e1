"""Behind a save: its sync and digest come after a while or when asked for, and old snapshots go after that."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import CapturingLogger

from swapper.snapshots.manifest import Fingerprint, GgufIdentity, Manifest
from workers.llama import keeping, slots
from workers.llama.keeping import Keeper
from workers.llama.slots import Keep, SlotFolder

MED = "llama/med"
NOW = Fingerprint("med", GgufIdentity("/m/med.gguf", "abc", 10, 5), "b1", 4096, 2, False)


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


@pytest.fixture
async def keeper(folder: SlotFolder, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(keeping, "SETTLE_S", 3600.0)
    keeper = Keeper(folder, Keep(), lambda: 1)
    yield keeper
    await keeper.close()


async def save(
    keeper: Keeper, name: str, *, saved_ms: int = 1, tokens: int = 50, restored: str | None = None
) -> Manifest:
    await keeper.begin(MED, name)
    (keeper.folder.path / name).write_bytes(bytes(100))
    manifest = Manifest(name, MED, NOW, 0, tokens, 100, saved_ms, boot=keeper.folder.boot)
    await keeper.finish(manifest, restored=restored)
    return manifest


def digest(folder: SlotFolder, name: str) -> str | None:
    manifest = folder.manifest(name)
    assert manifest is not None
    return manifest.digest


def free(mib: int) -> Callable[[Path], SimpleNamespace]:
    return lambda _path: SimpleNamespace(free=mib << 20)


async def test_a_failed_save_says_how_little_room_there_is_and_nothing_where_there_is_enough(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", free(511))
    assert await keeper.short() == f" ({folder.path} has 511 MiB free)"
    monkeypatch.setattr(shutil, "disk_usage", free(512))
    assert await keeper.short() == ""


async def test_a_folder_that_cannot_be_looked_at_adds_nothing_to_why_a_save_failed(
    keeper: Keeper, folder: SlotFolder
) -> None:
    folder.path.rmdir()
    assert await keeper.short() == ""


async def test_a_save_is_complete_without_its_digest_and_gets_it_when_a_restore_asks(
    keeper: Keeper, folder: SlotFolder
) -> None:
    manifest = await save(keeper, "a.kv")
    assert digest(folder, "a.kv") is None
    assert await keeper.problem(manifest, NOW, "1") is None
    assert digest(folder, "a.kv") is not None
    assert folder.verified("a.kv")


async def test_a_save_gets_its_digest_after_a_while_unasked(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "SETTLE_S", 0.001)
    settled = asyncio.Event()
    loop, settle = asyncio.get_running_loop(), folder.settle

    def told(manifest: Manifest) -> None:
        settle(manifest)
        loop.call_soon_threadsafe(settled.set)

    monkeypatch.setattr(folder, "settle", told)
    await save(keeper, "a.kv")
    await settled.wait()
    assert digest(folder, "a.kv") is not None


async def test_closing_finishes_what_is_under_way(keeper: Keeper, folder: SlotFolder) -> None:
    await save(keeper, "a.kv")
    await keeper.close()
    assert digest(folder, "a.kv") is not None


async def test_a_file_changed_after_it_was_verified_is_checked_again(keeper: Keeper, folder: SlotFolder) -> None:
    manifest = await save(keeper, "a.kv")
    await keeper.problem(manifest, NOW, "1")
    (folder.path / "a.kv").write_bytes(b"x" * 100)
    assert not folder.verified("a.kv")
    assert "damaged since the save" in (await keeper.problem(manifest, NOW, "1") or "")


async def test_an_old_snapshot_goes_when_its_newer_save_is_on_the_disk_and_before_the_next_listing(
    keeper: Keeper, folder: SlotFolder
) -> None:
    await save(keeper, "old.kv")
    await keeper.restored("old.kv")
    keeper.tidy(MED)
    await keeper.listing(MED, NOW, "1")
    await save(keeper, "new.kv", saved_ms=2, restored="old.kv")
    keeper.tidy(MED)
    await asyncio.sleep(0)
    assert folder.size("old.kv") == 100
    assert [info.snapshot for info in await keeper.listing(MED, NOW, "1")] == ["new.kv"]
    assert folder.size("old.kv") is None
    assert digest(folder, "new.kv") is not None


async def test_an_old_snapshot_stays_when_its_newer_save_cannot_be_brought_to_the_disk(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(keeper, "old.kv")
    await keeper.restored("old.kv")
    keeper.tidy(MED)
    await keeper.listing(MED, NOW, "1")

    def broken(_manifest: Manifest) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(folder, "settle", broken)
    await save(keeper, "new.kv", saved_ms=2, restored="old.kv")
    keeper.tidy(MED)
    assert [info.snapshot for info in await keeper.listing(MED, NOW, "1")] == ["new.kv", "old.kv"]


async def test_a_restored_snapshot_stays_when_its_slot_was_not_saved_or_holds_a_stranger_now(
    keeper: Keeper, folder: SlotFolder
) -> None:
    for name in ("a.kv", "b.kv"):
        await save(keeper, name)
        await keeper.restored(name)
    keeper.tidy(MED)
    await keeper.listing(MED, NOW, "1")
    await save(keeper, "stranger.kv", saved_ms=2, tokens=3, restored="a.kv")
    await save(keeper, "another-slot.kv", saved_ms=3, tokens=500)
    keeper.tidy(MED)
    listed = {info.snapshot for info in await keeper.listing(MED, NOW, "1")}
    assert listed == {"a.kv", "b.kv", "stranger.kv", "another-slot.kv"}


@pytest.mark.parametrize("lost", ["disk", "manifest"])
async def test_a_restore_that_cannot_be_noted_is_told_in_the_log_and_kept(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(keeping, "_log", said)
    await save(keeper, "a.kv")
    if lost == "manifest":
        folder.forget("a.kv")

    def full(_manifest: Manifest) -> bytes:
        raise OSError("no space left on device")

    monkeypatch.setattr(slots, "encode", full)
    await keeper.restored("a.kv")
    assert [(call.method_name, call.kwargs["snapshot"]) for call in said.calls] == [("warning", "a.kv")]
    monkeypatch.undo()


async def test_what_goes_and_why_is_in_the_log(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = CapturingLogger()
    monkeypatch.setattr(keeping, "_log", said)
    await save(keeper, "old.kv")
    keeper.tidy(MED)
    await keeper.listing(MED, NOW, "1")
    await save(keeper, "new.kv", saved_ms=2, restored="old.kv")
    keeper.tidy(MED)
    await keeper.listing(MED, NOW, "1")
    assert [call.kwargs for call in said.calls] == [{"snapshot": "old.kv", "why": "new.kv holds its conversation"}]


async def test_a_save_that_waits_for_another_moves_when_that_one_grows(keeper: Keeper, folder: SlotFolder) -> None:
    for name in ("a.kv", "b.kv"):
        await keeper.begin(MED, name)
    assert keeper.progress(MED) == (None, None)
    (folder.path / "a.kv").write_bytes(b"x")
    assert keeper.progress(MED) == (1, None)
    for name in ("a.kv", "b.kv"):
        await keeper.drop(MED, name)
    assert keeper.progress(MED) == ()


@pytest.mark.parametrize("slow", ["forget", "size", "seal", "manifest", "problem"])
async def test_while_a_swap_waits_for_the_disk_the_loop_goes_on(
    keeper: Keeper, folder: SlotFolder, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    manifest = await save(keeper, "a.kv")
    looped, seen, act = threading.Event(), list[bool](), getattr(folder, slow)

    def once_the_loop_went_on(*args: object) -> object:
        seen.append(looped.wait(5))
        return act(*args)

    acts: dict[str, Callable[[], Coroutine[None, None, object]]] = {
        "forget": lambda: keeper.begin(MED, "b.kv"),
        "size": lambda: keeper.size("a.kv"),
        "seal": lambda: keeper.finish(manifest),
        "manifest": lambda: keeper.restored("a.kv"),
        "problem": lambda: keeper.problem(manifest, NOW, "1"),
    }
    monkeypatch.setattr(folder, slow, once_the_loop_went_on)
    asyncio.get_running_loop().call_later(0.001, looped.set)
    await acts[slow]()
    assert set(seen) == {True}


async def test_a_save_does_not_wait_behind_the_syncs_and_digests_of_others(keeper: Keeper, folder: SlotFolder) -> None:
    done = threading.Event()
    digests = [asyncio.create_task(asyncio.to_thread(done.wait)) for _ in range(100)]
    try:
        async with asyncio.timeout(5):
            await save(keeper, "a.kv")
        assert folder.manifest("a.kv") is not None
    finally:
        done.set()
    await asyncio.gather(*digests)
