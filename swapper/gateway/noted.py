"""Where conversations are, noted in the state folder as it changes, so that a restart costs none of them.

Invariant: no call waits for the disk; one write runs at a time, and what changed meanwhile goes with the next. A write
is of all that a tenant has: where changes come by the hundred they wait for each other. A disk that refuses costs a
warning, never an answer. No text is in it, so that it is kept under `privacy: strict`, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

import structlog

from swapper.snapshots.index import Index
from swapper.snapshots.notes import Note, Notes, note_of

AT_ONCE, A_SECOND = 20, 10
"""So many writes are made as changes come, then so many a second: a kill between two costs what changed in between."""

log = structlog.get_logger(__name__)


class Noted:
    """Follows `index` from `load` on."""

    def __init__(self, notes: Notes, index: Index) -> None:
        self._notes = notes
        self._index = index
        self._due: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._told: str | None = None
        self._closing = asyncio.Event()
        self._left, self._since_s = float(AT_ONCE), 0.0

    async def load(self, tenants: Collection[str], stands: Callable[[str, str], bool]) -> None:
        """What an earlier process noted becomes known again; call it before anything is answered.

        `stands(tenant, load)`: whether that load of the tenant was the last one, so that its server is the same.
        """
        for note in await asyncio.to_thread(self._read, tenants):
            if stands(note.tenant, note.load):
                self._index.noted(note)
        self._index.watch = self._changed

    async def close(self) -> None:
        """Write what is left."""
        self._closing.set()
        if self._task is not None:
            await self._task

    def _changed(self, tenant: str) -> None:
        self._due[tenant] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_all(), name="notes of conversations")

    async def _write_all(self) -> None:
        while self._due:
            due, self._due = self._due, {}
            index = self._index
            notes = [note_of(tenant, index.load(tenant) or "", index.conversations(tenant)) for tenant in due]
            await asyncio.to_thread(self._write, notes)
            await self._rest()

    async def _rest(self) -> None:
        """Until another write may be made (a token bucket), or whoever stops wants the last one."""
        now = asyncio.get_running_loop().time()
        self._left = min(self._left + (now - self._since_s) * A_SECOND, AT_ONCE) - 1
        self._since_s = now
        if self._left >= 0:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(-self._left / A_SECOND):
                await self._closing.wait()

    def _write(self, notes: Collection[Note]) -> None:
        for note in notes:
            try:
                self._notes.write(note)
            except OSError as error:
                self._tell(error)
            else:
                self._told = None

    def _tell(self, error: OSError) -> None:
        """Once for each trouble, not for each conversation."""
        why = error.strerror or str(error)
        if why != self._told:
            said = "where conversations are could not be noted; after a restart some may be read again"
            log.warning(said, reason=why)
            self._told = why

    def _read(self, tenants: Collection[str]) -> list[Note]:
        try:
            return [*self._notes.load(tenants)]
        except OSError as error:
            log.warning("the notes of conversations could not be read", reason=error.strerror or str(error))
            return []
