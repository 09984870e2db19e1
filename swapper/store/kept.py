"""The embedded store while one process serves: started or adopted, started again when it was killed, ended with us.

Invariant: one keeper a store. Who has the lock of its data folder keeps it; a store that another process keeps is let
alone. The server is held by a descriptor of its process, so that it is ended whatever became of its folder, and nobody
else's is. A store whose data was taken away is not started again: it would come up empty, and forget leases that are
held.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
from pathlib import Path

import structlog

from swapper.errors import ConfigError, StoreDown, SwapperError
from swapper.statefolder import in_place, reason
from swapper.store import embedded
from swapper.store.embedded import STOP_LIMIT_S, Embedded

log = structlog.get_logger(__name__)

RETRY_S = 1.0


class Kept:
    """The store of `state_dir`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._data: int | None = None
        self._process: int | None = None
        self._pid: int | None = None

    def pid(self) -> int | None:
        """The server's process while we keep it."""
        return None if self._process is None else self._pid

    def lost(self) -> str | None:
        """What became of its data, in a sentence; None while it is as it was."""
        data = embedded.data(self._state_dir)
        if self._data is None or in_place(data, self._data):
            return None
        return (
            f"the state folder {self._state_dir} was removed or replaced while swapper serves from it ({data.name} is "
            "not the one it had): it goes on as far as open connections to the store reach, and all it knows ends with "
            "it; restart it once no lease is held"
        )

    async def start(self) -> Embedded:
        """The server, ready. Raises StoreDown when it does not come up, ConfigError when another process keeps it."""
        server = await embedded.start(self._state_dir)
        try:
            if self._data is None:
                self._data = _claimed(embedded.data(self._state_dir))
            self._let_go()
            self._process, self._pid = os.pidfd_open(server.pid), server.pid
        except ProcessLookupError:
            self._process = None  # it is gone again: `keep` starts the next
        except OSError as error:
            raise StoreDown(f"the embedded store cannot be kept: {reason(error)}") from error
        return server

    async def keep(self) -> None:
        """Start it again whenever it ends, with all it had acknowledged; until then nothing is decided.

        Raises SwapperError when its data was taken away.
        """
        while True:
            if self._process is not None:
                await _ended(self._process)
            log.warning("the embedded store ended")
            await self._again()
            log.warning("the embedded store was started again")
            await asyncio.sleep(RETRY_S)  # one that ends with its first write is not started ten times a second

    async def _again(self) -> None:
        """Start it, however long that takes: each reason why it does not start is told once, not with every try."""
        told: str | None = None
        while True:
            if (lost := self.lost()) is not None:
                raise SwapperError(f"the embedded store ended and cannot be started again: {lost}")
            try:
                await self.start()
                return
            except StoreDown as down:
                if str(down) != told:
                    told = str(down)
                    log.error("the embedded store does not start; trying again every second", error=told)
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """End it and wait until it is gone. Its data stays. Raises StoreDown when it does not go within 20 s."""
        if self._data is None:
            return  # never had
        try:
            if self.lost() is None:
                await embedded.stop(self._state_dir)
            if self._process is not None:
                await asyncio.to_thread(_end, self._process)  # of a folder that is gone; else it has ended already
        finally:
            self._let_go()
            os.close(self._data)
            self._data = None

    def _let_go(self) -> None:
        if self._process is not None:
            os.close(self._process)
        self._process = None


def _claimed(data: Path) -> int:
    """The data folder, open and locked: removing any file lets nobody else keep this store."""
    folder = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ConfigError([f"state_dir: another process keeps the store in {data.parent}; stop it first"]) from None
    except OSError as error:  # NFS locks no folders
        log.warning("the store's data folder cannot be locked", folder=str(data), error=error.strerror)
    return folder


async def _ended(process: int) -> None:
    """Return when the process is gone (at once if it is already)."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process)


def _end(process: int) -> None:
    """KILL it: what it acknowledged is written. On TERM it would remove its socket by path, which may be another's."""
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        return
    going = select.poll()
    going.register(process, select.POLLIN)
    if not going.poll(STOP_LIMIT_S * 1000):
        raise StoreDown(f"the embedded store did not end within {STOP_LIMIT_S:.0f} s")
