"""The slot folder: which snapshots lie in it, what their manifests say, and whether a file is still what was saved.

Invariant: a snapshot counts only with its manifest, written after the file and replaced in one move; a file and its
sidecars (same stem) come and go together. Only regular files are opened, or given to the server to open. Touches the
slot folder only. All functions block: call them in threads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import xxhash

from swapper.core.conversations import WORTH_TOKENS
from swapper.errors import BackendError
from swapper.snapshots.manifest import MANIFEST_SUFFIX, Fingerprint, Manifest, decode, encode, refusal
from workers.hostram import FLOOR_MIB, available, in_memory
from workers.llama.refused import Refusals, Stamp
from workers.llama.regular import NotRegular, open_regular, rewrite_regular, stat_regular
from workers.llama.retention import REREAD, only_copies, short_and_left, superseded, went_on
from workers.vram.unified import HostMemory

_CHUNK = 1 << 20
_MANIFEST_BYTES = 1 << 20
"""No manifest is larger; more of what calls itself one is not read."""
AGE_MS = 7 * 24 * 3_600_000
"""How long a snapshot stays where nothing else is configured: what an abandoned swap saved must not stay for ever."""
_SHORT = f"shorter than {WORTH_TOKENS} tokens: read faster than it is brought back"
_log = structlog.stdlib.get_logger("workers.llama")


@dataclass(frozen=True, slots=True)
class Keep:
    """How long snapshots stay: `age_ms` since the save (None: a week), `bytes` for all of them (None: no budget).

    `free_bytes` are left on the disk: with less, nothing more is saved.
    """

    age_ms: int | None = None
    bytes: int | None = None
    free_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Removed:
    """A snapshot that was deleted, and why. `lost`: it may have been the last copy of its conversation."""

    snapshot: str
    why: str
    lost: Manifest | None = None


class SlotFolder:
    """One folder of slot files as this host sees it, shared by all models of one router."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._was_there = path.is_dir()
        self.refusals = Refusals(path)
        self._verified: dict[str, Stamp] = {}
        self._passed_over: set[str] = set()
        self._over = False
        self.boot = _boot_id()

    def make_again(self) -> None:
        """Make a folder that was there and is gone (not its parents): without it llama-server loads no model.

        One that never was there may be a wrong path. What cannot be made is said, and by the load that then fails.
        """
        if not self._was_there:
            return
        try:
            self.path.mkdir()
            _log.warning("the slot folder was gone with what was saved there, and was made again", path=str(self.path))
        except FileExistsError:
            pass
        except OSError as error:
            _log.warning("the slot folder is gone and cannot be made again", path=str(self.path), error=str(error))

    def size(self, name: str) -> int | None:
        """Bytes of a slot file, None when it is not there. Raises NotRegular when it is something else."""
        try:
            return stat_regular(self.path / name).st_size
        except FileNotFoundError:
            return None

    def forget(self, name: str) -> None:
        """Take a manifest away before its file is written again. Raises NotRegular when that is no file."""
        self.size(name)
        (self.path / (name + MANIFEST_SUFFIX)).unlink(missing_ok=True)
        self.refusals.forget(name)
        self._verified.pop(name, None)

    def seal(self, manifest: Manifest) -> None:
        """Close the file and its sidecars to other users and write the manifest, the last thing of a save."""
        beside = [(name, size) for name in self._sidecars(manifest.snapshot) if (size := self._size(name)) is not None]
        for name in (manifest.snapshot, *(name for name, _ in beside)):
            with contextlib.suppress(PermissionError), open_regular(self.path / name) as file:
                os.fchmod(file.fileno(), 0o600)  # another user's keeps its own mode
        self.write(replace(manifest, sidecars=tuple(beside)))

    def _size(self, name: str) -> int | None:
        """As `size`; what is no regular file is passed over."""
        try:
            return self.size(name)
        except NotRegular as other:
            self._pass_over(other)
            return None

    def _sidecars(self, name: str) -> list[str]:
        """The files with the stem of a snapshot that are no snapshot of their own, nor a folder."""
        stem = name.rpartition(".")[0] or name
        others = (other for other in os.listdir(self.path) if other.startswith(stem + ".") and other != name)
        plain = (other for other in others if not other.endswith((MANIFEST_SUFFIX, MANIFEST_SUFFIX + ".tmp")))
        alone = (other for other in plain if not (self.path / (other + MANIFEST_SUFFIX)).exists())
        return sorted(other for other in alone if self._is_file(self.path / other))

    def _is_file(self, path: Path) -> bool:
        """A folder is nobody's sidecar, whatever its name: it stays, and keeps nothing else from going."""
        if path.is_dir() and not path.is_symlink():
            self._pass_over(NotRegular(path))
            return False
        return True

    def write(self, manifest: Manifest, *, durable: bool = False) -> None:
        """Write or replace a manifest in one move; what cannot be completed leaves nothing behind.

        `durable`: it is on the disk, with its name, when this returns.
        """
        path = self.path / (manifest.snapshot + MANIFEST_SUFFIX)
        fresh = path.with_name(path.name + ".tmp")
        file = rewrite_regular(fresh, 0o600)
        try:
            with file:
                file.write(encode(manifest))
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(fresh, path)
            if durable:
                _sync_folder(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def settle(self, manifest: Manifest) -> None:
        """Force the file to the disk, then rewrite its manifest with the digest. A vanished file is left alone."""
        path = self.path / manifest.snapshot
        try:
            for name in (manifest.snapshot, *self._sidecars(manifest.snapshot)):
                with open_regular(self.path / name) as file:
                    os.fsync(file.fileno())
            if self._written_since_seal(manifest.snapshot):
                return
            stamp = _stamp(path)  # before the digest: what is written while it is computed must not pass for read
            digest = file_digest(path)
            current = self.manifest(manifest.snapshot)
        except FileNotFoundError:
            return
        if current is not None and self.size(manifest.snapshot) == manifest.bytes:
            self.write(replace(current, digest=digest), durable=True)
            self._verified[manifest.snapshot] = stamp

    def _written_since_seal(self, name: str) -> bool:
        """Whether the file was changed after its manifest was written: its digest would then prove nothing."""
        path = self.path / name
        return path.stat().st_mtime_ns > path.with_name(name + MANIFEST_SUFFIX).stat().st_mtime_ns

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of one snapshot; None when there is none or it cannot be read as one."""
        try:
            with open_regular(self.path / (name + MANIFEST_SUFFIX)) as file:
                return decode(file.read(_MANIFEST_BYTES))
        except NotRegular as other:
            self._pass_over(other)
        except (OSError, ValueError):
            pass
        return None

    def _pass_over(self, other: NotRegular) -> None:
        """Said once of each."""
        if other.filename not in self._passed_over:
            self._passed_over.add(other.filename)
            _log.warning("passed over in the slot folder", path=other.filename, why=other.strerror)

    def manifests(self, tenant: str | None = None) -> list[Manifest]:
        """All snapshots (of one tenant), the last used first."""
        found = [m for m in self._all() if tenant is None or m.tenant == tenant]
        return sorted(found, key=lambda m: (m.last_ms, m.saved_ms, m.snapshot), reverse=True)

    def _all(self) -> Iterator[Manifest]:
        for path in self.path.glob("*" + MANIFEST_SUFFIX):
            manifest = self.manifest(path.name.removesuffix(MANIFEST_SUFFIX))
            if manifest is not None and manifest.snapshot + MANIFEST_SUFFIX == path.name:
                yield manifest

    def problem(self, manifest: Manifest, now: Fingerprint) -> str | None:
        """Why a snapshot must not be restored, judged by fingerprint, size and what is known of its digest."""
        try:
            size = self.size(manifest.snapshot)
        except NotRegular as other:
            self._pass_over(other)
            return f"its file cannot be read: {other.strerror}"
        if size is None:
            return "its file is gone"
        if size != manifest.bytes:
            return f"its file has {size} bytes instead of {manifest.bytes}"
        if (why := self._sidecar_problem(manifest)) is not None:
            return why
        if manifest.digest is None and manifest.boot != self.boot:
            return "the machine went down before its digest was written, so the file is not to be trusted"
        return refusal(manifest, now) or self._known_damage(manifest.snapshot)

    def _sidecar_problem(self, manifest: Manifest) -> str | None:
        for name, written in manifest.sidecars:
            size = self._size(name)
            if size != written:
                found = "is gone" if size is None else f"has {size} bytes instead of {written}"
                return f"{name}, which the server wrote beside it, {found}"
        return None

    def _known_damage(self, name: str) -> str | None:
        try:
            return self.refusals.damage(name, _stamp(self.path / name))
        except OSError as error:
            return f"its file cannot be read: {error.strerror}"

    def verified(self, name: str) -> bool:
        """True when the file's digest was right and the file is untouched since."""
        try:
            return name in self._verified and self._verified[name] == _stamp(self.path / name)
        except OSError:
            return False

    def damage(self, name: str) -> str | None:
        """Why a file is not what was saved, by its digest (remembered as long as the file is untouched)."""
        path, manifest = self.path / name, self.manifest(name)
        if manifest is None:
            return "its manifest is gone"
        try:
            stamp = _stamp(path)
            if self._verified.get(name) == stamp:
                return None
            why = self.refusals.damage(name, stamp)
            if why is None and (why := self._changed(manifest)) is not None:
                self.refusals.damaged(name, why, stamp)
        except OSError as error:
            return f"its file cannot be read: {error.strerror}"
        if why is None and manifest.digest is not None:
            self._verified[name] = stamp
        return why

    def _changed(self, manifest: Manifest) -> str | None:
        """As far as the bytes themselves tell. Reads the whole file."""
        if manifest.digest is None:
            written = self._written_since_seal(manifest.snapshot)
            return "its file was written to after the save" if written else None
        if file_digest(self.path / manifest.snapshot) != manifest.digest:
            return "its file was damaged since the save (the digest differs)"
        return None

    def remove(self, name: str) -> None:
        """Delete a snapshot, manifest first, with every sidecar of the same stem."""
        (self.path / (name + MANIFEST_SUFFIX)).unlink(missing_ok=True)
        for other in (name, *self._sidecars(name)):
            if self._is_file(self.path / other):
                (self.path / other).unlink(missing_ok=True)
        self._verified.pop(name, None)

    def supersede(self, restored: str, by: str) -> Removed | None:
        """Delete a snapshot that was restored, now that `by` is saved from the very slot it was restored into.

        Or of which a gateway says that `by` has gone on from it; only where `by` can have all of it. None: it stays.
        """
        old, new = self.manifest(restored), self.manifest(by)
        if old is None or new is None or old.tenant != new.tenant or new.tokens < old.tokens - REREAD:
            return None
        self.remove(restored)
        return Removed(restored, _held(by))

    def went_on(self, restored: str, new: Manifest) -> bool:
        """Whether what is saved from a slot now may be what was restored into it; a stranger may have taken it."""
        old = self.manifest(restored)
        return old is not None and went_on(old, new)

    def prune(
        self, keep: Keep, now_ms: int, current: Collection[str] = (), copies: Collection[str] = ()
    ) -> list[Removed]:
        """Delete by age, what is too short to come back, what newer copies hold, the longest unused beyond the budget.

        Returns what was deleted.

        The budget never takes what may be the only copy of a conversation (see retention.py): `current` were saved in
        this run, `copies` are in the server as well. Age does. A manifest whose file is gone goes by age alone: it
        takes no room, and it stands for no copy.
        """
        age_ms = AGE_MS if keep.age_ms is None else keep.age_ms
        everything = self.manifests()
        there = [manifest for manifest in everything if self._size(manifest.snapshot) is not None]
        spared = only_copies(there, current, copies)
        gone: dict[str, str] = {}
        for manifest in everything:
            if now_ms - manifest.saved_ms > age_ms:
                gone[manifest.snapshot] = f"older than {age_ms / 3_600_000:.4g} h"
        left = [manifest for manifest in there if manifest.snapshot not in gone]
        gone |= dict.fromkeys(short_and_left(left, copies), _SHORT)
        newer = superseded(left, {manifest.snapshot for manifest in left if self._is_sound(manifest)})
        gone |= {name: _held(by) for name, by in newer.items() if name not in gone}
        left = [manifest for manifest in left if manifest.snapshot not in gone]
        over = 0 if keep.bytes is None else sum(manifest.room for manifest in left) - keep.bytes
        for manifest in reversed(left):
            if over > 0 and manifest.snapshot not in spared:
                gone[manifest.snapshot] = f"beyond the budget of {(keep.bytes or 0) >> 20} MiB"
                over -= manifest.room
        lost = {m.snapshot: m for m in there if m.snapshot in spared and now_ms - m.saved_ms > age_ms}
        self._tell_over(over, keep)
        for name in gone:
            self.remove(name)
        return [Removed(name, why, lost.get(name)) for name, why in gone.items()]

    def _tell_over(self, over: int, keep: Keep) -> None:
        """Once until there is room again: what is left beyond the budget may be gone for good where it goes."""
        if over > 0 and not self._over:
            more = f"{over / (1 << 20):,.1f} MiB beyond the budget of {(keep.bytes or 0) >> 20} MiB"
            advice = "raise snapshots.budget, shorten snapshots.keep, or purge what nobody needs"
            _log.warning(
                f"snapshots take {more}, and each may be the only copy of its conversation: {advice}",
                path=str(self.path),
            )
        self._over = over > 0

    def _is_sound(self, manifest: Manifest) -> bool:
        """Whether the file is as it was saved, as far as is known without reading it."""
        return self._size(manifest.snapshot) == manifest.bytes and (
            self._sidecar_problem(manifest) is None and self._known_damage(manifest.snapshot) is None
        )

    def check_space(self, keep: Keep) -> None:
        """Raise BackendError when the disk has less free than the floor."""
        short = self.short(keep)
        if short is not None:
            raise BackendError(f"{short}, the floor is {keep.free_bytes >> 20} MiB: nothing is saved")

    def short(self, keep: Keep) -> str | None:
        """What the disk has free, in words, where that is less than the floor. Raises OSError.

        Of one that is in the machine's memory (tmpfs) it is no more than that has to spare.
        """
        free = shutil.disk_usage(self.path).free
        if in_memory(self.path):
            memory = available()
            left = memory.free_mib - FLOOR_MIB if isinstance(memory, HostMemory) else 0
            free = min(free, max(0, left) << 20)
        return f"{self.path} has {free >> 20} MiB free" if free < keep.free_bytes else None


def _held(by: str) -> str:
    return f"{by} holds its conversation"


def file_digest(path: Path) -> str:
    """xxh3-128 (hex) of a file's bytes."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        read: Callable[[], bytes] = lambda: file.read(_CHUNK)  # noqa: E731
        for chunk in iter(read, b""):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    """The names in it, too, are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _stamp(path: Path) -> Stamp:
    stat = stat_regular(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
