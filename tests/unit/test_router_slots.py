"""The slot folder: what counts as a snapshot, what is trusted, what may be deleted."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swapper.core.conversations import WORTH_TOKENS
from swapper.errors import BackendError
from swapper.snapshots.manifest import MANIFEST_SUFFIX, Fingerprint, GgufIdentity, Manifest
from workers.llama import slots
from workers.llama.slots import AGE_MS, Keep, SlotFolder

NOW = Fingerprint("med", GgufIdentity("/m/med.gguf", "abc", 10, 5), "b1", 4096, 2, False)


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    return SlotFolder(tmp_path)


def snapshot(
    folder: SlotFolder, name: str, *, saved_ms: int = 1, tenant: str = "llama/med", tokens: int = 500, token: int = 0
) -> Manifest:
    (folder.path / name).write_bytes(bytes(100))
    manifest = Manifest(name, tenant, NOW, 0, tokens, 100, saved_ms, token=token, boot=folder.boot)
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


def test_who_was_used_last_comes_first_whenever_it_was_saved(folder: SlotFolder) -> None:
    folder.write(replace(snapshot(folder, "swept.kv", saved_ms=5), used_ms=1))
    folder.write(replace(snapshot(folder, "talked.kv", saved_ms=4), used_ms=3))
    snapshot(folder, "nobody-knows.kv", saved_ms=2)
    assert [m.snapshot for m in folder.manifests()] == ["talked.kv", "nobody-knows.kv", "swept.kv"]


def test_the_only_copies_are_those_of_the_newest_swap_not_of_the_last_use(folder: SlotFolder) -> None:
    folder.write(replace(snapshot(folder, "old.kv", saved_ms=1, token=1), used_ms=9))
    folder.write(replace(snapshot(folder, "new.kv", saved_ms=2, token=2), used_ms=3))
    assert [gone.snapshot for gone in folder.prune(Keep(bytes=100), now_ms=10)] == ["old.kv"]


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


def test_a_byte_changed_in_place_under_the_old_time_is_found(folder: SlotFolder) -> None:
    folder.settle(snapshot(folder, "a.kv"))
    assert folder.verified("a.kv")
    path = folder.path / "a.kv"
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the kernel's clock has its ticks
        with path.open("r+b") as file:
            file.write(b"\1")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert not folder.verified("a.kv")
    assert "damaged" in (folder.damage("a.kv") or "")


def test_a_file_deleted_before_its_digest_was_known_is_left_alone(folder: SlotFolder) -> None:
    manifest = snapshot(folder, "a.kv")
    folder.remove("a.kv")
    folder.settle(manifest)
    assert list(folder.path.iterdir()) == []


def test_sidecars_are_private_and_known_by_name_and_size(folder: SlotFolder) -> None:
    ckpt = folder.path / "a.ckpt"
    ckpt.write_bytes(b"12345")
    os.mkfifo(folder.path / "a.pipe")
    snapshot(folder, "a.kv")
    manifest = folder.manifest("a.kv")
    assert manifest is not None
    assert (manifest.sidecars, manifest.room) == ((("a.ckpt", 5),), 105)
    assert ckpt.stat().st_mode & 0o777 == 0o600
    assert folder.problem(manifest, NOW) is None


def test_without_its_sidecar_or_with_less_of_it_a_snapshot_is_refused(folder: SlotFolder) -> None:
    ckpt = folder.path / "a.ckpt"
    ckpt.write_bytes(b"12345")
    snapshot(folder, "a.kv")
    manifest = folder.manifest("a.kv")
    assert manifest is not None
    ckpt.write_bytes(b"1234")
    assert folder.problem(manifest, NOW) == "a.ckpt, which the server wrote beside it, has 4 bytes instead of 5"
    ckpt.unlink()
    assert folder.problem(manifest, NOW) == "a.ckpt, which the server wrote beside it, is gone"


def test_the_budget_counts_sidecars(folder: SlotFolder) -> None:
    for number, name in enumerate(("a", "b"), start=1):
        (folder.path / f"{name}.ckpt").write_bytes(bytes(50))
        snapshot(folder, f"{name}.kv", saved_ms=number, token=number)
    assert folder.prune(Keep(bytes=300), now_ms=10) == []
    assert [gone.snapshot for gone in folder.prune(Keep(bytes=299), now_ms=10)] == ["a.kv"]
    assert {path.name for path in folder.path.iterdir()} == {"b.kv", "b.kv" + MANIFEST_SUFFIX, "b.ckpt"}


def test_sidecars_go_with_their_snapshot_and_neighbours_stay(folder: SlotFolder) -> None:
    snapshot(folder, "med.a1.0.kv")
    snapshot(folder, "med.a1.0.b.kv")
    (folder.path / "med.a1.0.ckpt").write_bytes(b"x")
    (folder.path / "med.a1.01.ckpt").write_bytes(b"x")
    folder.remove("med.a1.0.kv")
    left = {path.name for path in folder.path.iterdir()}
    assert left == {"med.a1.0.b.kv", "med.a1.0.b.kv" + MANIFEST_SUFFIX, "med.a1.01.ckpt"}


@pytest.mark.parametrize(("tokens", "replaced"), [(92, True), (500, True), (91, False), (1, False)])
def test_a_save_replaces_what_was_restored_into_its_slot_only_if_it_can_be_that_conversation_gone_on(
    folder: SlotFolder, tokens: int, replaced: bool
) -> None:
    restored(folder, snapshot(folder, "restored.kv", tokens=100))
    snapshot(folder, "new.kv", tokens=tokens)
    assert (folder.supersede("restored.kv", "new.kv") is not None) is replaced
    assert names(folder) == ({"new.kv"} if replaced else {"new.kv", "restored.kv"})


def test_nothing_is_replaced_by_a_save_that_is_not_there_or_of_another_tenant(folder: SlotFolder) -> None:
    restored(folder, snapshot(folder, "restored.kv"))
    snapshot(folder, "of-alpha.kv", tenant="llama/alpha")
    assert folder.supersede("restored.kv", "missing.kv") is None
    assert folder.supersede("restored.kv", "of-alpha.kv") is None
    assert names(folder) == {"restored.kv", "of-alpha.kv"}


def gone(folder: SlotFolder, keep: Keep, now_ms: int = 100, current: set[str] | None = None) -> list[str]:
    return [removed.snapshot for removed in folder.prune(keep, now_ms, current or set())]


def test_old_snapshots_go_by_age_and_the_oldest_beyond_the_budget(folder: SlotFolder) -> None:
    for saved_ms in (10, 20, 30, 40):
        snapshot(folder, f"{saved_ms}.kv", saved_ms=saved_ms, token=saved_ms)
    assert gone(folder, Keep(age_ms=25), now_ms=40) == ["10.kv"]
    assert gone(folder, Keep(bytes=250), now_ms=40) == ["20.kv"]
    assert gone(folder, Keep()) == []


def test_a_snapshot_goes_after_a_week_where_no_age_is_configured_even_an_only_copy(folder: SlotFolder) -> None:
    snapshot(folder, "a.kv", saved_ms=0)
    assert gone(folder, Keep(), AGE_MS) == []
    assert [(r.snapshot, r.why) for r in folder.prune(Keep(), AGE_MS + 1)] == [("a.kv", "older than 168 h")]


def test_the_budget_spares_every_save_of_the_run_that_just_ended(folder: SlotFolder) -> None:
    for n in (1, 2, 3):
        snapshot(folder, f"{n}.kv", saved_ms=n, token=n)
    assert gone(folder, Keep(bytes=0), current={"2.kv", "3.kv"}) == ["1.kv"]


def test_the_budget_spares_what_every_tenant_has_not_got_back_of_its_newest_swap(folder: SlotFolder) -> None:
    snapshot(folder, "orphan.kv", saved_ms=1, tenant="llama/alpha", token=1)
    snapshot(folder, "alpha-0.kv", saved_ms=2, tenant="llama/alpha", token=2)
    snapshot(folder, "alpha-1.kv", saved_ms=3, tenant="llama/alpha", token=2)
    restored(folder, snapshot(folder, "alpha-2.kv", saved_ms=4, tenant="llama/alpha", token=2))
    snapshot(folder, "med.kv", saved_ms=5, token=3)
    removed = folder.prune(Keep(bytes=0), 100)
    assert [r.snapshot for r in removed] == ["orphan.kv", "alpha-2.kv"]
    assert {r.why for r in removed} == {"beyond the budget of 0 MiB"}
    assert names(folder) == {"alpha-0.kv", "alpha-1.kv", "med.kv"}


def test_a_manifest_whose_file_is_gone_takes_no_room_stands_for_no_copy_and_goes_by_age(folder: SlotFolder) -> None:
    snapshot(folder, "only-copy.kv", saved_ms=1, token=1)
    for n in range(2, 6):
        snapshot(folder, f"gone-{n}.kv", saved_ms=n, token=n)
        (folder.path / f"gone-{n}.kv").unlink()
    assert gone(folder, Keep(bytes=100)) == []
    assert gone(folder, Keep(bytes=0)) == []
    assert gone(folder, Keep(age_ms=10), now_ms=13) == ["gone-2.kv", "only-copy.kv"]
    assert names(folder) == {"gone-3.kv", "gone-4.kv", "gone-5.kv"}


def test_a_manifest_that_cannot_be_completed_leaves_the_old_one_and_nothing_beside_it(
    folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = snapshot(folder, "a.kv")
    before = {path.name for path in folder.path.iterdir()}

    def full(_manifest: Manifest) -> bytes:
        raise OSError("no space left on device")

    monkeypatch.setattr(slots, "encode", full)
    with pytest.raises(OSError, match="no space"):
        folder.write(replace(manifest, restored_ms=5))
    assert {path.name for path in folder.path.iterdir()} == before
    assert folder.manifest("a.kv") == manifest


def test_a_folder_that_vanished_is_made_again_and_one_that_never_was_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    folder, wrong = SlotFolder(tmp_path / "slots"), SlotFolder(tmp_path / "slot")
    snapshot(folder, "a.kv")
    shutil.rmtree(folder.path)
    for one in (folder, wrong):
        one.make_again()
    assert [path.name for path in tmp_path.iterdir()] == ["slots"]
    snapshot(folder, "b.kv")
    folder.make_again()
    assert folder.manifest("b.kv") is not None


def test_a_folder_that_cannot_be_made_again_is_left_to_the_load_to_tell(tmp_path: Path) -> None:
    (tmp_path / "disk" / "slots").mkdir(parents=True)
    folder = SlotFolder(tmp_path / "disk" / "slots")
    shutil.rmtree(tmp_path / "disk")
    folder.make_again()
    assert not folder.path.exists()


def test_a_disk_below_its_floor_refuses_saves(folder: SlotFolder) -> None:
    folder.check_space(Keep(free_bytes=1))
    with pytest.raises(BackendError, match="nothing is saved"):
        folder.check_space(Keep(free_bytes=1 << 62))


def test_half_a_gib_of_the_disk_stays_free_where_nothing_else_is_said(
    folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk(_path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=(512 << 20) - 1)

    monkeypatch.setattr(shutil, "disk_usage", disk)
    with pytest.raises(BackendError, match="has 511 MiB free, the floor is 512 MiB"):
        folder.check_space(Keep())


def test_a_file_changed_before_its_digest_was_known_is_refused_and_gets_none(folder: SlotFolder) -> None:
    manifest = snapshot(folder, "med.1.0.kv")
    path, sealed = folder.path / manifest.snapshot, folder.path / (manifest.snapshot + MANIFEST_SUFFIX)
    later = sealed.stat().st_mtime_ns + 1
    os.utime(path, ns=(later, later))
    assert folder.damage(manifest.snapshot) == "its file was written to after the save"
    folder.settle(manifest)
    settled = folder.manifest(manifest.snapshot)
    assert settled is not None
    assert settled.digest is None


def test_what_is_too_short_to_come_back_goes_once_its_tenant_left_without_it(folder: SlotFolder) -> None:
    snapshot(folder, "left-before.kv", saved_ms=1, tokens=WORTH_TOKENS - 1, token=1)
    snapshot(folder, "long-enough.kv", saved_ms=2, tokens=WORTH_TOKENS, token=1)
    restored(folder, snapshot(folder, "gone-since.kv", saved_ms=3, tokens=20, token=1))
    snapshot(folder, "beside-calls.kv", saved_ms=9, tokens=20, token=3)
    snapshot(folder, "newest.kv", saved_ms=7, tokens=20, token=2)
    restored(folder, snapshot(folder, "in-a-slot.kv", saved_ms=6, tokens=20, token=1))
    snapshot(folder, "another's.kv", saved_ms=1, tokens=20, token=1, tenant="llama/alpha")
    removed = folder.prune(Keep(), 100, copies={"beside-calls.kv"})
    assert {r.snapshot for r in removed} == {"left-before.kv", "gone-since.kv"}
    assert {r.why for r in removed} == {"shorter than 128 tokens: read faster than it is brought back"}
