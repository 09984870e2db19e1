"""The slot folder belongs to others too: what is no regular file there is neither opened nor in anybody's way."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from swapper.errors import BackendError
from swapper.snapshots.manifest import MANIFEST_SUFFIX, Fingerprint, GgufIdentity, Manifest
from workers.llama import slots
from workers.llama.keeping import Keeper
from workers.llama.regular import NotRegular, open_regular, rewrite_regular
from workers.llama.slots import Keep, SlotFolder

MED = "llama/med"
NOW = Fingerprint("med", GgufIdentity("/m/med.gguf", "abc", 10, 5), "b1", 4096, 2, False)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_a_file(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(bytes(100))
    path.symlink_to("elsewhere")


Make = Callable[[Path], None]
OTHERS: list[Make] = [os.mkfifo, Path.mkdir, a_socket, a_loop, a_link_to_a_device, a_link_to_a_file]
every_other = pytest.mark.parametrize("make", OTHERS)


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> CapturingLogger:
    said = CapturingLogger()
    monkeypatch.setattr(slots, "_log", said)
    return said


def snapshot(folder: SlotFolder, name: str, *, digest: str | None = None) -> Manifest:
    (folder.path / name).write_bytes(bytes(100))
    manifest = Manifest(name, MED, NOW, 0, 50, 100, 1, boot=folder.boot, digest=digest)
    folder.seal(manifest)
    return manifest


@every_other
def test_a_manifest_that_is_no_regular_file_is_passed_over_and_named_once(
    folder: SlotFolder, said: CapturingLogger, make: Make
) -> None:
    snapshot(folder, "a.kv")
    make(folder.path / ("b.kv" + MANIFEST_SUFFIX))
    for _ in range(2):
        assert [manifest.snapshot for manifest in folder.manifests(MED)] == ["a.kv"]
    [call] = said.calls
    assert call.kwargs["path"].endswith("b.kv" + MANIFEST_SUFFIX)
    assert "no regular file" in call.kwargs["why"]


@every_other
@pytest.mark.parametrize("digest", [None, "known"])
async def test_a_slot_file_that_is_no_regular_file_is_refused_without_being_opened(
    folder: SlotFolder, said: CapturingLogger, make: Make, digest: str | None
) -> None:
    manifest = snapshot(folder, "a.kv", digest=digest)
    (folder.path / "a.kv").unlink()
    make(folder.path / "a.kv")
    keeper = Keeper(folder, Keep(), lambda: 1)
    await keeper.read_ahead(MED)
    [listed] = await keeper.listing(MED, NOW, "1")
    assert listed.refused == "its file cannot be read: a.kv is no regular file"
    assert await keeper.problem(manifest, NOW, "1") == listed.refused
    assert folder.damage("a.kv") == listed.refused
    assert not folder.verified("a.kv")
    await keeper.close()
    assert len(said.calls) == 1


@every_other
async def test_nothing_is_saved_over_what_is_no_regular_file(folder: SlotFolder, make: Make) -> None:
    make(folder.path / "a.kv")
    keeper = Keeper(folder, Keep(), lambda: 1)
    with pytest.raises(BackendError, match=r"a\.kv is no regular file"):
        await keeper.begin(MED, "a.kv")
    await keeper.close()


@every_other
def test_a_manifest_is_not_written_through_what_is_no_regular_file(folder: SlotFolder, make: Make) -> None:
    make(folder.path / ("a.kv" + MANIFEST_SUFFIX + ".tmp"))
    with pytest.raises(NotRegular):
        snapshot(folder, "a.kv")


def test_a_folder_that_is_named_like_a_sidecar_stays_and_keeps_nothing_else(
    folder: SlotFolder, said: CapturingLogger
) -> None:
    for name in ("a.kv", "b.kv"):
        snapshot(folder, name)
        (folder.path / name.replace(".kv", ".dir")).mkdir()
    assert len(folder.prune(Keep(age_ms=1), 100)) == 2
    assert {path.name for path in folder.path.iterdir()} == {"a.dir", "b.dir"}
    assert len(said.calls) == 2


def test_what_calls_itself_a_manifest_and_is_endless_is_not_read(folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    with (folder.path / ("b.kv" + MANIFEST_SUFFIX)).open("wb") as endless:
        endless.truncate(1 << 40)
    assert [manifest.snapshot for manifest in folder.manifests()] == ["a.kv"]


def test_what_was_swapped_after_the_first_look_is_not_read_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "fifo")
    stat = (tmp_path / "file").lstat()

    def earlier(_path: Path) -> os.stat_result:
        return stat

    monkeypatch.setattr(Path, "lstat", earlier)
    with pytest.raises(NotRegular):
        open_regular(tmp_path / "fifo")


def test_a_file_that_is_written_again_loses_what_was_in_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"long before")
    with rewrite_regular(tmp_path / "a", 0o600) as file:
        file.write(b"now")
    with open_regular(tmp_path / "a") as file:
        assert file.read() == b"now"
