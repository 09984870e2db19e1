"""Keeping the files of the models that left in the page cache while a lease has their card, so that they load fast.

Invariant: only memory that nobody needs is used: a file is read only while the machine's available memory stays above a
floor with all of it in. What is in the cache is not read again. Reads files and /proc/meminfo; changes nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import structlog

from workers.backend import Backend, Filed
from workers.hostram import FLOOR_MIB, available
from workers.vram.unified import HostMemory

LOOK_S = 20.0
"""So often it is looked whether the lease's own work has pushed the files out again."""
_PIECE = 8 << 20
_MIB = 1 << 20
_HERE = bytes(byte & 1 for byte in range(256))
"""What mincore(2) says of a page, its other bits left out; as a table, for a model has millions of pages."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
log = structlog.stdlib.get_logger(__name__)


def missing(path: Path) -> list[tuple[int, int]]:
    """The pieces (offset, bytes; up to 8 MiB each) of a file that are not all in the page cache. Blocking.

    Raises OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return []
        # Writable but private, which is never written to: ctypes hands out no address of what is read-only.
        with mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            try:
                resident = _resident(ctypes.addressof(first), size)
            finally:
                del first
    pages = _PIECE // mmap.PAGESIZE
    pieces = range(0, len(resident), pages)
    gone = (at for at in pieces if 0 in resident[at : at + pages].translate(_HERE))
    return [(at * mmap.PAGESIZE, min(_PIECE, size - at * mmap.PAGESIZE)) for at in gone]


def _resident(address: int, size: int) -> bytes:
    """A byte a page, its lowest bit set where the page is in memory (mincore(2))."""
    count = -(-size // mmap.PAGESIZE)
    vector = ctypes.create_string_buffer(count)
    if _libc.mincore(address, size, vector) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return vector.raw[:count]


class PageCache:
    """`files` gives the files a tenant loads, `memory` what the machine has."""

    def __init__(
        self,
        files: Callable[[str], Awaitable[Sequence[Path]]],
        *,
        memory: Callable[[], object] = available,
        floor_mib: int = FLOOR_MIB,
        look_s: float = LOOK_S,
    ) -> None:
        self._files = files
        self._memory = memory
        self._floor_mib = floor_mib
        self._look_s = look_s
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="page cache", initializer=_last)
        self._left: dict[str, dict[str, None]] = {}
        self._keeping: dict[str, tuple[asyncio.Task[None], threading.Event]] = {}
        self.rounds = asyncio.Condition()

    def left(self, card: str, tenant: str) -> None:
        """A tenant left a card: it will probably come back."""
        self._left.setdefault(card, {})[tenant] = None

    def held(self, card: str) -> None:
        """The card was proved free for somebody: who left it is kept at hand until the next load on it."""
        tenants = self._left.pop(card, {})
        if tenants and card not in self._keeping:
            stop = threading.Event()
            task = asyncio.create_task(self._keep(tuple(tenants), stop), name=f"page cache of {card}")
            self._keeping[card] = (task, stop)

    def comes(self, card: str) -> None:
        """Something is loaded on the card: it reads for itself."""
        self._left.pop(card, None)
        if (keeping := self._keeping.pop(card, None)) is not None:
            keeping[1].set()
            keeping[0].cancel()

    async def close(self) -> None:
        """Stop reading."""
        tasks = [task for task, _ in self._keeping.values()]
        for card in list(self._keeping):
            self.comes(card)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._reader.shutdown(wait=False)

    async def _keep(self, tenants: Sequence[str], stop: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                for tenant in tenants:
                    for path in await self._files(tenant):
                        await loop.run_in_executor(self._reader, self._bring, tenant, path, stop)
                async with self.rounds:
                    self.rounds.notify_all()
                await asyncio.sleep(self._look_s)
        finally:
            stop.set()

    def _bring(self, tenant: str, path: Path, stop: threading.Event) -> None:
        try:
            gone = missing(path)
            read = sum(self._read(path, gone, stop)) if self._fits(sum(size for _, size in gone)) else 0
        except (OSError, ValueError) as error:  # ValueError: it became shorter while it was mapped
            log.info("a model's file cannot be read ahead", tenant=tenant, path=str(path), why=str(error))
            return
        if read:
            log.info("read ahead for when it comes back", tenant=tenant, path=str(path), mib=read // _MIB)

    def _fits(self, size: int) -> bool:
        memory = self._memory()
        return isinstance(memory, HostMemory) and memory.free_mib - size // _MIB >= self._floor_mib

    def _read(self, path: Path, pieces: Sequence[tuple[int, int]], stop: threading.Event) -> Iterator[int]:
        """Bytes read of each piece; ends early when told to, or when others need the memory."""
        with path.open("rb", buffering=0) as file:
            for at, size in pieces:
                if stop.is_set() or not self._fits(size):
                    return
                yield len(os.pread(file.fileno(), size, at))


def _last() -> None:
    """Of a thread that works when nobody else does."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


async def files_of(backends: Mapping[str, Backend], tenant: str) -> Sequence[Path]:
    """What a tenant reads to load, where the backend of its server knows that."""
    backend = backends.get(tenant.partition("/")[0])
    return await backend.files(tenant) if isinstance(backend, Filed) else ()
