"""The snapshots of one router: what was saved since the last load, which digests are under way, what may go.

Invariant: nothing slow happens on the way of a swap: files are synced and their digests computed a while after a save
(at once when a load asks for them) and read ahead during a load, old files are removed after the release; what a swap
does wait for holds up no call: it runs beside the loop. What may be the only copy of a conversation goes only by age,
and that is told at its tenant's next load; whatever goes is named in the log with the reason. What must not be restored
stays as well, but is listed in one run only (a run: one process of a model, known by its port).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

import structlog

from swapper.errors import BackendError
from swapper.snapshots.manifest import Fingerprint, Manifest
from workers.backend import SnapshotInfo
from workers.llama.slots import Keep, Removed, SlotFolder

_READ_AHEAD = 8
LISTED = 100
"""At most so many refused snapshots are told of in one load, and so many offered where there are not more slots."""
SETTLE_S = 1.0
"""From a save to its sync: the store's own syncs, which the swap waits for, would have to wait behind it."""
SWIFT_THREADS = 2
"""For what a swap waits for."""
P = ParamSpec("P")
T = TypeVar("T")
_log = structlog.stdlib.get_logger("workers.llama")


@dataclass(slots=True)
class _Run:
    """Saves of one tenant in this run of it, each with the snapshot that had been restored into its slot.

    `open` are those begun and not finished, `beside` those whose conversation went on in the server, `back` those that
    were restored into it.
    """

    saved: dict[str, str | None] = field(default_factory=dict[str, str | None])
    open: set[str] = field(default_factory=set[str])
    beside: set[str] = field(default_factory=set[str])
    back: set[str] = field(default_factory=set[str])


class Keeper:
    """The asynchronous face of a SlotFolder."""

    def __init__(self, folder: SlotFolder, keep: Keep, now_ms: Callable[[], int]) -> None:
        self.folder = folder
        self._keep = keep
        self._now_ms = now_ms
        self._swift = ThreadPoolExecutor(SWIFT_THREADS, thread_name_prefix="slot folder")
        self._runs: dict[str, _Run] = {}
        self._lost: dict[str, list[Removed]] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._hurry: dict[str, asyncio.Event] = {}
        self._checking: dict[str, asyncio.Task[str | None]] = {}
        self._tidying: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Finish what is under way."""
        self._hurry_all()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*self._settling.values(), *self._checking.values(), return_exceptions=True)

    async def begin(self, tenant: str, name: str) -> None:
        """A save starts; raises BackendError when the disk is too full for any."""
        with self.disk():
            await self._at_once(self._clear, name)
        self._runs.setdefault(tenant, _Run()).open.add(name)

    def _clear(self, name: str) -> None:
        self.folder.check_space(self._keep)
        self.folder.forget(name)

    async def short(self) -> str:
        """For the end of a sentence about a save that failed: how little the disk has free; nothing where it has."""
        try:
            said = await self._at_once(self.folder.short, self._keep)
        except OSError:
            return ""
        return f" ({said})" if said else ""

    async def size(self, name: str) -> int | None:
        """Bytes of a slot file, None when it is not there."""
        with self.disk():
            return await self._at_once(self.folder.size, name)

    async def manifest(self, name: str) -> Manifest | None:
        """The manifest of one snapshot; None when there is none or it cannot be read as one."""
        return await self._at_once(self.folder.manifest, name)

    def progress(self, tenant: str) -> tuple[int | None, ...]:
        """Changes while any save of the tenant is being written: the server writes one after the other.

        On the loop, but only where a save takes longer than its time.
        """
        with self.disk():
            return tuple(self.folder.size(name) for name in sorted(self._runs.get(tenant, _Run()).open))

    async def drop(self, tenant: str, name: str) -> None:
        """A save came to nothing that is worth keeping."""
        with self.disk():
            await asyncio.to_thread(self.folder.remove, name)
        self._runs[tenant].open.discard(name)
        self._runs[tenant].saved.pop(name, None)

    async def finish(self, manifest: Manifest, *, restored: str | None = None) -> None:
        """A save is complete: write its manifest; sync and digest follow in the background.

        `restored`: the snapshot that was restored into this slot of this very process, which the save may replace.
        """
        run = self._runs[manifest.tenant]  # a release meanwhile takes it away, and the file with it
        with self.disk():
            await self._at_once(self.folder.seal, manifest)
        run.open.discard(manifest.snapshot)
        run.saved[manifest.snapshot] = restored
        name, hurry = manifest.snapshot, asyncio.Event()
        self._hurry[name] = hurry
        self._settling[name] = task = asyncio.create_task(self._settle(manifest, hurry), name=f"digest {name}")
        task.add_done_callback(lambda ended: self._settled(name, ended))

    async def _settle(self, manifest: Manifest, hurry: asyncio.Event) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await hurry.wait()
        await asyncio.to_thread(self.folder.settle, manifest)

    def _hurry_all(self) -> None:
        for hurry in self._hurry.values():
            hurry.set()

    def _settled(self, name: str, task: asyncio.Task[None]) -> None:
        if self._settling.get(name) is task:
            del self._settling[name], self._hurry[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("no digest could be written", snapshot=name, error=str(error))

    def replace_soon(self, tenant: str, name: str, *, beside: bool = True) -> None:
        """The tenant goes on: what this save replaces goes once the save is on the disk, and what is old with it.

        `beside`: so does its conversation, in the server; else another one took its slot, and this is its last copy.
        """
        if beside:
            self._runs[tenant].beside.add(name)
        self._in_background(self._replace(tenant, name), f"replace by {name}")

    async def _replace(self, tenant: str, name: str) -> None:
        settling, run = self._settling.get(name), self._runs.get(tenant)
        if settling is not None:
            await asyncio.wait({settling})
        if run is None or (settling is not None and (settling.cancelled() or settling.exception() is not None)):
            return  # the release goes over it again
        try:
            while self._runs.get(tenant) is run and (old := run.saved.get(name)) is not None:
                removed = await asyncio.to_thread(self.folder.supersede, old, name)
                if removed is None:
                    break
                _log.info("snapshot removed", snapshot=removed.snapshot, why=removed.why)
                if self._runs.get(tenant) is run:
                    run.saved[name] = run.saved.pop(old, None)  # what that was to replace is replaced by this one
            self._note(await self._prune())
        except (OSError, BackendError) as error:
            _log.warning("a replaced snapshot could not be removed", snapshot=name, error=str(error))

    def tidy(self, tenant: str) -> None:
        """The tenant is released: in the background, clear away failed saves, what new saves replaced, what is old."""
        run = self._runs.pop(tenant, _Run())
        self._tidying[tenant] = self._in_background(self._tidy_later(tenant, run), f"tidy {tenant}")

    async def _tidy_later(self, tenant: str, run: _Run) -> None:
        """What a new save replaces goes only when that is on the disk."""
        settling = [self._settling[name] for name in run.saved if name in self._settling]
        if settling:
            await asyncio.wait(settling)
        kept = all(not task.cancelled() and task.exception() is None for task in settling)
        current = {name for other in (run, *self._runs.values()) for name in other.saved}
        await asyncio.to_thread(self._tidy, run, current, replace_old=kept and not run.open)

    def _tidy(self, run: _Run, current: set[str], *, replace_old: bool) -> None:
        try:
            for name in run.open:  # its writer is gone now
                self.folder.remove(name)
                _log.info("snapshot removed", snapshot=name, why="its save was not finished")
            pairs = [(old, by) for by, old in run.saved.items() if replace_old and old is not None]
            for removed in filter(None, (self.folder.supersede(old, by) for old, by in pairs)):
                _log.info("snapshot removed", snapshot=removed.snapshot, why=removed.why)
            self._note(self.folder.prune(self._keep, self._now_ms(), current, self._copies()))
        except OSError as error:
            _log.warning("old snapshots could not be removed", folder=str(self.folder.path), error=str(error))

    async def remove(self, names: Collection[str]) -> None:
        """Delete snapshots because somebody said so, whatever they are the only copy of."""
        with self.disk():
            for name in names:
                await asyncio.to_thread(self.folder.remove, name)
                _log.info("snapshot removed", snapshot=name, why="by hand")

    async def prune(self) -> list[Removed]:
        """Apply age and budget now, as after a release. What is being saved, and was in this run, stays.

        Of what is in the server as well only age and budget decide.
        """
        gone = await self._prune()
        self._log_removed(gone)
        return gone

    async def _prune(self) -> list[Removed]:
        current = {name for run in self._runs.values() for name in (*run.saved, *run.open)}
        with self.disk():
            return await asyncio.to_thread(self.folder.prune, self._keep, self._now_ms(), current, self._copies())

    def _copies(self) -> set[str]:
        """Those whose conversations are in the server as well."""
        return {name for run in self._runs.values() for name in (*run.beside, *run.back)}

    def _log_removed(self, gone: Sequence[Removed]) -> None:
        for removed in gone:
            _log.info("snapshot removed", snapshot=removed.snapshot, why=removed.why)

    def _note(self, gone: Sequence[Removed]) -> None:
        """Nobody asked for it: what may have been lost by it is told when its tenant is loaded next."""
        self._log_removed(gone)
        for removed in gone:
            if removed.lost is not None:
                self._lost.setdefault(removed.lost.tenant, []).append(removed)
                del self._lost[removed.lost.tenant][:-LISTED]

    async def read_ahead(self, tenant: str) -> None:
        """A load begins: check the digests of the newest snapshots meanwhile, so that a restore finds them known."""
        await asyncio.to_thread(self.folder.make_again)
        if tenant in self._runs:  # whatever ended its process, what was saved of it is the only copy now
            self._runs[tenant].beside.clear()
            self._runs[tenant].back.clear()
        self._in_background(self._read_ahead(tenant), f"read ahead {tenant}")

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _read_ahead(self, tenant: str) -> None:
        for manifest in (await asyncio.to_thread(self.folder.manifests, tenant))[:_READ_AHEAD]:
            name = manifest.snapshot
            if name in self._settling or not await asyncio.to_thread(self.folder.verified, name):
                await self._check(name)

    async def listing(self, tenant: str, now: Fingerprint, run: str) -> tuple[SnapshotInfo, ...]:
        """The snapshots of a tenant, the last used first, judged by size and fingerprint; refused ones in one run only.

        `run` names the process the tenant runs in.
        """
        if tidying := self._tidying.get(tenant):
            self._hurry_all()
            await asyncio.wait({tidying})
        listed = await asyncio.to_thread(self._listing, tenant, now, run)
        return (*listed, *(_info(one.lost, f"deleted: {one.why}") for one in self._lost.pop(tenant, ()) if one.lost))

    def _listing(self, tenant: str, now: Fingerprint, run: str) -> tuple[SnapshotInfo, ...]:
        refusals = self.folder.refusals
        judged = [(m, self.folder.problem(m, now)) for m in self.folder.manifests(tenant)]
        due = [(m, why) for m, why in judged if why is None or refusals.due(m.snapshot, why, run)]
        offered = [m for m, why in due if why is None][: max(LISTED, now.n_parallel)]
        refused = [m for m, why in due if why is not None]
        listed = {m.snapshot for m in (*offered, *refused[:LISTED])}
        infos: list[SnapshotInfo] = []
        for m, why in due:
            if m.snapshot in listed:
                infos.append(_info(m, why))
                if why is not None:
                    refusals.tell(m.snapshot, why, run)
        return (*infos, *_more(tenant, refused[LISTED:]))

    async def problem(self, manifest: Manifest, now: Fingerprint, run: str) -> str | None:
        """Why a snapshot must not be restored: size, fingerprint, digest. What is said here counts as told."""
        why = await self._at_once(self.folder.problem, manifest, now)
        if why is None and not await self._at_once(self.folder.verified, manifest.snapshot):
            why = await self._check(manifest.snapshot)
        if why is not None:
            await asyncio.to_thread(self.folder.refusals.tell, manifest.snapshot, why, run)
        return why

    async def restored(self, name: str) -> None:
        """Note in the manifest that the conversation is back in a slot, so that this is not its only copy just now.

        It is back without the note as well: one that cannot be written only spares the file longer.
        """
        tenant = await self._at_once(self._note_restored, name)
        if tenant is not None:
            self._runs.setdefault(tenant, _Run()).back.add(name)

    def _note_restored(self, name: str) -> str | None:
        """Returns whose it is."""
        current = self.folder.manifest(name)
        if current is None:
            _log.warning("the manifest of a restored snapshot vanished", snapshot=name)
            return None
        try:
            self.folder.write(replace(current, restored_ms=self._now_ms()))
        except OSError as error:
            _log.warning("a restore could not be noted in its manifest", snapshot=name, error=str(error))
        return current.tenant

    async def _at_once(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Off the loop, on threads of their own: a swap waits for it, and must not wait behind syncs and digests."""
        return await asyncio.get_running_loop().run_in_executor(self._swift, partial(act, *args, **kwargs))

    @contextmanager
    def disk(self) -> Generator[None]:
        """What the disk refuses is a BackendError that names the folder."""
        try:
            yield
        except OSError as error:
            raise BackendError(f"slot_dir {self.folder.path} cannot be used: {error.strerror or error}") from error

    def _check(self, name: str) -> asyncio.Task[str | None]:
        if name not in self._checking:
            task = asyncio.create_task(self._damage(name), name=f"check {name}")
            task.add_done_callback(lambda _: self._checking.pop(name, None))
            self._checking[name] = task
        return self._checking[name]

    async def _damage(self, name: str) -> str | None:
        settling = self._settling.get(name)
        if settling is not None:
            self._hurry[name].set()
            await asyncio.wait({settling})
        return await asyncio.to_thread(self.folder.damage, name)


def _info(m: Manifest, why: str | None) -> SnapshotInfo:
    known = (m.id, m.links, m.used_ms)
    return SnapshotInfo(m.snapshot, m.slot, m.tokens, m.bytes, m.saved_ms, m.strategy, why, *known)


def _more(tenant: str, unlisted: Sequence[Manifest]) -> tuple[SnapshotInfo, ...]:
    """The one line about those a load does not tell of singly (the next ones do), newest first."""
    if not unlisted:
        return ()
    why = f"{len(unlisted)} more must not be restored; later loads tell of each, {LISTED} at a time"
    _log.warning("snapshots refused", tenant=tenant, why=why)
    return (SnapshotInfo(f"{tenant}: {len(unlisted)} more", 0, 0, 0, unlisted[0].saved_ms, refused=why),)
