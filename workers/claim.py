"""The claim of an agent on its host: whoever has it obeys as that executor, and knows until when it surely is the one.

Invariant: a command has an effect only while the claim is surely ours: for less than its ttl after the last beat was
sent, by our own clock, which is before it can end by the store's. After that nothing goes on before the store has
said again that it is ours, and nothing ever again once it was another's; what was ordered until it came to us is
refused, also in the midst of a verb. It touches the store and the floor of the marks.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Protocol

import structlog

from swapper.errors import BackendRefused, ConfigError, StoreDown, SwapperError
from swapper.store.protocol import Claimed, Held
from workers.marks import Marks
from workers.supervise import until_stored

TTL_MS = 10_000
"""So long after its last beat an agent counts as there."""
BEAT_S = 2.5
_LOOK_S = 0.5
"""Between two looks at a claim that another left or has: the looks see its next beat."""

OBEYED: ContextVar[int | None] = ContextVar("OBEYED", default=None)
"""The token of the command that is carried out."""

Fence = Callable[[], Awaitable[None]]
"""Returns when what asks may have an effect now. Raises BackendRefused where it never may."""

log = structlog.stdlib.get_logger(__name__)


class Link(Protocol):
    """What a claim needs of the store."""

    async def claim(self, executor: str, owner: str, *, who: str, ttl_ms: int) -> Claimed | Held:
        """Be the executor for so long from now, or hear who is. Raises StoreDown."""
        ...

    async def unclaim(self, executor: str, owner: str) -> None:
        """Be it no more. Raises StoreDown."""
        ...


class ClaimLost(SwapperError):
    """Another is the agent of this host now."""


class Claim:
    """The claim on `executor` by the owner of the marks."""

    def __init__(self, link: Link, executor: str, marks: Marks) -> None:
        self._link = link
        self._executor = executor
        self._marks = marks
        self._until = float("-inf")
        self._asking = asyncio.Lock()
        self._lost: asyncio.Event = asyncio.Event()
        self._by = ""

    async def take(self) -> None:
        """Have it: at once, or when the claim of one that is heard no more has ended.

        Raises ConfigError when another is heard, StoreDown.
        """
        ends_ms: int | None = None
        while (held := await self._ask()) is not None:
            if ends_ms is None:
                log.info("another was the agent of this host; waiting whether it is heard", who=held.who)
            elif held.ends_ms != ends_ms:
                raise ConfigError([f"{self._taken(held.who)}; stop that one, or give this one a store of its own"])
            ends_ms = held.ends_ms
            await asyncio.sleep(min(held.left_ms / 1000, _LOOK_S))

    @property
    def surely_ours(self) -> bool:
        """True until the last beat might have run out."""
        return asyncio.get_running_loop().time() < self._until

    async def sure(self) -> None:
        """Return while it is ours, after asking again where that is not sure; wait for ever once it is another's."""
        if self.surely_ours:
            return
        async with self._asking:
            if not self.surely_ours:
                await until_stored("claim the host", self._beat)
        if self._lost.is_set():
            await asyncio.Event().wait()  # until the agent is ended, which `keep` sees to

    async def fence(self) -> None:
        """`sure`, and the command that is carried out is one that was ordered while it was ours."""
        await self.sure()
        token, floor = OBEYED.get(), self._marks.floor
        if token is not None and token <= floor:
            raise BackendRefused("another was the agent of this host meanwhile; what was ordered before is not done")

    async def keep(self) -> None:
        """Renew it until cancelled. Raises ClaimLost once it is another's."""
        while not self._lost.is_set():
            async with self._asking:
                await until_stored("keep the claim on the host", self._beat)
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._lost.wait()
            except TimeoutError:
                continue
        raise ClaimLost(f"{self._taken(self._by)}; this one, which was not heard for a while, stops")

    async def give_up(self) -> None:
        """Let another have it at once. Where the store is away it runs out by itself."""
        self._until = float("-inf")
        try:
            await self._link.unclaim(self._executor, self._marks.owner)
        except StoreDown:
            log.warning("store down while leaving; the claim on the host runs out by itself")

    async def _beat(self) -> None:
        held = await self._ask()
        if held is not None:
            self._by = held.who
            self._lost.set()

    async def _ask(self) -> Held | None:
        sent = asyncio.get_running_loop().time()
        who = f"swapper, process {os.getpid()} on {socket.gethostname()}"
        answer = await self._link.claim(self._executor, self._marks.owner, who=who, ttl_ms=TTL_MS)
        if isinstance(answer, Held):
            return answer
        self._marks.raise_floor(answer.floor)
        if not self._lost.is_set():
            self._until = sent + TTL_MS / 1000
        return None

    def _taken(self, who: str) -> str:
        host = self._executor.removeprefix("agent:")
        return f"host {host}: another agent obeys for it in this store ({who}), and two would undo each other's work"
