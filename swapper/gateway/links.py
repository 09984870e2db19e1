"""The connections to the servers: idle ones are used again, the most recent first, and closed when they idle for long.

Invariant: a connection is in use by one call or idle here, never both; what is idle when its server closes it is gone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from swapper.gateway.link import Link, LinkError, Origin

CONNECT_S = 10.0
IDLE_S = 30.0
"""Servers close idle connections as well: the longer one idles the likelier it ends under the next call."""


class Links:
    """See the module. One for a gateway process; `close` ends all."""

    def __init__(self) -> None:
        self._idle: dict[Origin, deque[Link]] = {}
        self._used: set[Link] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def to(self, origin: Origin) -> Link:
        """A new connection for one call. Raises LinkError with `unsent`."""
        if self._closed:
            raise LinkError("the gateway stops", unsent=True)
        link = await self._connected(origin)
        if self._closed:
            link.drop()
            raise LinkError("the gateway stops", unsent=True)
        self._used.add(link)
        return link

    def idle(self, origin: Origin) -> Link | None:
        """One that was used before, where there is one: it need not be waited for."""
        idle = self._idle.get(origin)
        while idle:
            link = idle.pop()
            if link.fit:
                link.reused = True
                self._used.add(link)
                return link
        return None

    def back(self, link: Link) -> None:
        """The call is over, however it ended: a connection whose answer is whole may be used again."""
        self._used.discard(link)
        if not link.fit or self._closed:
            link.drop()
            return
        loop = asyncio.get_running_loop()
        link.idle_since = loop.time()
        link.rest()
        self._idle.setdefault(link.origin, deque()).append(link)
        if self._sweeper is None:
            self._sweeper = loop.call_later(IDLE_S, self._sweep)

    def close(self) -> None:
        """Close all; whoever waits for an answer hears it."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for link in (*self._used, *(link for idle in self._idle.values() for link in idle)):
            link.drop()
        self._idle.clear()

    async def _connected(self, origin: Origin) -> Link:
        loop = asyncio.get_running_loop()
        if origin.tls and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        try:
            async with asyncio.timeout(CONNECT_S):
                _, link = await loop.create_connection(
                    lambda: Link(origin), origin.host, origin.port, ssl=self._tls if origin.tls else None
                )
        except TimeoutError as error:
            text = f"no connection to {origin.host}:{origin.port} within {CONNECT_S:g} s"
            raise LinkError(text, unsent=True) from error
        except OSError as error:
            text = f"no connection to {origin.host}:{origin.port}: {error.strerror or error}"
            raise LinkError(text, unsent=True) from error
        return link

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_S
        for origin, idle in tuple(self._idle.items()):
            while idle and (idle[0].idle_since <= oldest or not idle[0].fit):
                idle.popleft().drop()
            if not idle:
                del self._idle[origin]
        self._sweeper = loop.call_later(IDLE_S, self._sweep) if self._idle else None
