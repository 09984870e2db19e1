"""The requests of conversations that are kept on disk as well: read at the start, written as they change.

Invariant: no call waits for the disk; one write runs at a time, and what changed meanwhile goes with the next. A disk
that refuses costs a warning, never an answer. Of a tenant that is not kept on disk (any more) nothing stays there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from swapper.gateway.parse import Ask, parse_body
from swapper.snapshots.bodies import Bodies, Remembered
from swapper.snapshots.chain import Chain, chain_of
from swapper.snapshots.conversation import Conversation
from swapper.snapshots.index import Index

log = structlog.get_logger(__name__)

_Change = tuple[str, str, Conversation | None]


@dataclass(frozen=True, slots=True)
class _Read:
    """A request from the disk and its chain."""

    one: Remembered
    chain: Chain


class Written:
    """`index` must be followed; of its `tenants` the requests are kept in `bodies`."""

    def __init__(self, bodies: Bodies, index: Index, tenants: frozenset[str]) -> None:
        self._bodies = bodies
        self._index = index
        self._tenants = tenants
        self._task: asyncio.Task[None] | None = None
        self._told: str | None = None

    async def load(self) -> None:
        """What earlier processes knew becomes known again; call it before anything is answered."""
        for read in await asyncio.to_thread(self._read):
            one = read.one
            self._index.remembered(one.tenant, read.chain, one.request, one.tokens, one.used_ms)
        dropped = [change for change in self._index.changes() if change[2] is None]  # the others are there already
        await asyncio.to_thread(self._write, dropped)

    def due(self) -> None:
        """Something may have changed: write it, soon."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_all(), name="requests to disk")

    async def close(self) -> None:
        """Write what is left."""
        self.due()
        if self._task is not None:
            await self._task

    async def _write_all(self) -> None:
        while changes := self._index.changes():
            await asyncio.to_thread(self._write, changes)

    def _write(self, changes: Sequence[_Change]) -> None:
        for tenant, name, talk in changes:
            try:
                if talk is None or tenant not in self._tenants:
                    self._bodies.remove(tenant, name)
                else:
                    self._bodies.write(tenant, talk)
            except OSError as error:
                self._tell(error)
            else:
                self._told = None

    def _tell(self, error: OSError) -> None:
        """Once for each trouble, not for each conversation."""
        why = error.strerror or str(error)
        if why != self._told:
            log.warning("a request could not be kept on disk; it will not outlive this process", reason=why)
            self._told = why

    def _read(self) -> list[_Read]:
        found: list[_Read] = []
        try:
            for one in self._bodies.load():
                chain = _chain(one) if one.tenant in self._tenants else None
                if chain is None:
                    self._bodies.remove(one.tenant, one.id)
                else:
                    found.append(_Read(one, chain))
        except OSError as error:
            log.warning("the requests kept on disk could not be read", reason=error.strerror or str(error))
        return found


def _chain(one: Remembered) -> Chain | None:
    ask = parse_body(one.request.body)
    return chain_of(one.request.path, ask.fields) if isinstance(ask, Ask) and ask.fields is not None else None
