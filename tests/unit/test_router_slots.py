"""The slot folder: what counts as a snapshot, what is trusted, what may be deleted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swapper.errors import BackendError
from swapper.snapshots.manifest import MANIFEST_SUFFIX, Fingerprint, GgufIdentity, Manifest
from workers.llama.slots import Keep, SlotFolder

NOW = Fingerprint("med", GgufIdentity("/m/med.gguf", "abc", 10, 5), "b1", 4096, 2, False)


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


def snapshot(
    folder: SlotFolder, name: str, *, saved_ms: int = 1, tenant: str = "llama/med", size: int = 100
) -> Manifest:
    (folder.path / name).write_bytes(bytes(size))
    manifest = Manifest(name, tenant, NOW, 0, 50, size, saved_ms, boot=folder.boot)
    folder.seal(manifest)
    return manifest


def restored(folder: SlotFolder, manifest: Manifest) -> Manifest:
    manifest = replace(manifest, restored_ms=manifest.saved_ms + 1)
    folder.write(manifest)
    return manifest


def names(folder: SlotFolder) -> set[str]:
    return {manifest.snapshot for manifest in folder.manifests()}


def test_a_file_without_a_manifest_is_no_snapshot(folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    (folder.path / "half-written.kv").write_bytes(b"x")
    (folder.path / ("torn.kv" + MANIFEST_SUFFIX)).write_text("{")
    assert names(folder) == {"a.kv"}


def test_the_newest_snapshot_of_a_tenant_comes_first(folder: SlotFolder) -> None:
    snapshot(folder, "old.kv", saved_ms=1)
    snapshot(folder, "new.kv", saved_ms=3)
    snapshot(folder, "others.kv", saved_ms=2, tenant="llama/alpha")
    assert [m.snapshot for m in folder.manifests("llama/med")] == ["new.kv", "old.kv"]


def test_a_manifest_under_another_name_than_its_own_does_not_count(folder: SlotFolder) -> None:
    snapshot(folder, "a.kv")
    (folder.path / ("a.kv" + MANIFEST_SUFFIX)).rename(folder.path / ("b.kv" + MANIFEST_SUFFIX))
    assert names(folder) == set()


def test_a_missing_or_cut_file_is_refused_by_its_size(folder: SlotFolder) -> None:
    manifest = snapshot(folder, "a.kv")
    assert folder.problem(manifest, NOW) is None
    (folder.path / "a.kv").write_bytes(bytes(99))
    assert "99 bytes instead of 100" in (folder.problem(manifest, NOW) or "")
    (folder.path / "a.kv").unlink()
    assert folder.problem(manifest, NOW) == "its file is gone"


def test_a_file_is_trusted_without_a_digest_only_until_the_machine_restarts(folder: SlotFolder) -> None:
    manifest = snapshot(folder, "a.kv")
    earlier = replace(manifest, boot="another boot")
    assert "digest" in (folder.problem(earlier, NOW) or "")
    assert folder.problem(replace(earlier, digest="known"), NOW) is None


def test_the_digest_arrives_in_the_manifest_and_finds_a_changed_byte(folder: SlotFolder) -> None:
    manifest = snapshot(folder, "a.kv")
    folder.settle(manifest)
    settled = folder.manifest("a.kv")
    assert settled is not None
    assert settled.digest is not None
    assert folder.damage("a.kv") is None
    (folder.path / "a.kv").write_bytes(bytes(99) + b"\1")
    assert "damaged" in (folder.damage("a.kv") or "")


def test_a_file_deleted_before_its_digest_was_known_is_left_alone(folder: SlotFolder) -> None:
    manifest = snapshot(folder, "a.kv")
    folder.remove("a.kv")
    folder.settle(manifest)
    assert list(folder.path.iterdir()) == []


def test_sidecars_go_with_their_snapshot_and_neighbours_stay(folder: SlotFolder) -> None:
    snapshot(folder, "med.a1.0.kv")
    snapshot(folder, "med.a1.0.b.kv")
    (folder.path / "med.a1.0.ckpt").write_bytes(b"x")
    (folder.path / "med.a1.01.ckpt").write_bytes(b"x")
    folder.remove("med.a1.0.kv")
    left = {path.name for path in folder.path.iterdir()}
    assert left == {"med.a1.0.b.kv", "med.a1.0.b.kv" + MANIFEST_SUFFIX, "med.a1.01.ckpt"}


def test_a_newer_save_replaces_what_was_restored_and_nothing_else(folder: SlotFolder) -> None:
    restored(folder, snapshot(folder, "restored.kv", saved_ms=1))
    snapshot(folder, "never-restored.kv", saved_ms=2)
    restored(folder, snapshot(folder, "of-alpha.kv", saved_ms=1, tenant="llama/alpha"))
    snapshot(folder, "new.kv", saved_ms=10)
    assert folder.supersede("llama/med", {"new.kv"}) == ["restored.kv"]
    assert names(folder) == {"never-restored.kv", "of-alpha.kv", "new.kv"}


@pytest.mark.parametrize("keep", [set[str](), {"missing.kv"}, {"new.kv", "missing.kv"}])
def test_without_every_newer_save_nothing_is_replaced(folder: SlotFolder, keep: set[str]) -> None:
    restored(folder, snapshot(folder, "restored.kv", saved_ms=1))
    snapshot(folder, "new.kv", saved_ms=10)
    assert folder.supersede("llama/med", keep) == []


def test_old_snapshots_go_by_age_and_the_oldest_beyond_the_budget(folder: SlotFolder) -> None:
    for saved_ms in (10, 20, 30, 40):
        snapshot(folder, f"{saved_ms}.kv", saved_ms=saved_ms)
    assert folder.prune(Keep(age_ms=25), now_ms=40) == ["10.kv"]
    assert folder.prune(Keep(bytes=250), now_ms=40) == ["20.kv"]
    assert folder.prune(Keep(), now_ms=10**15) == []


def test_a_disk_below_its_floor_refuses_saves(folder: SlotFolder) -> None:
    folder.check_space(Keep())
    with pytest.raises(BackendError, match="nothing is saved"):
        folder.check_space(Keep(free_bytes=1 << 62))
