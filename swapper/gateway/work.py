"""What work an open socket is: none but while somebody asks and is answered; then it is a call like any other.

Invariant: an open socket keeps no model on its card. A client's message is a call of its model that ends once no
message came for QUIET_S, and ANSWER_S after the last one that the client sent, however much a server goes on telling. A
shut gate ends the sockets without work at once, the others as soon as theirs is over or is cut.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import WSCloseCode

from swapper.core.types import WorkClass
from swapper.gateway.admission import Call
from swapper.gateway.sockets import End
from swapper.gateway.turns import CallState, Full, Turn

if TYPE_CHECKING:
    from swapper.gateway.admission import Admission

QUIET_S = 10.0
ANSWER_S = 60.0
LEAVES = WSCloseCode.SERVICE_RESTART
"""1012: the model left its card; whoever connects again may have it back."""
BUSY = WSCloseCode.TRY_AGAIN_LATER
"""1013: a message could not be taken."""


class Work:
    """The work of one socket of a tenant. `ends` is done once it must be closed, with code and reason."""

    def __init__(self, sockets: Sockets, tenant: str, klass: WorkClass, owner: str, max_wait_ms: int) -> None:
        self.ends: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._sockets = sockets
        self._who = (tenant, klass, owner, max_wait_ms)
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asked_s = 0.0
        self._until_s = 0.0

    @property
    def tenant(self) -> str:
        """Whose socket it is."""
        return self._who[0]

    async def asked(self) -> None:
        """A client's message is about to go up: it waits for its turn where there is one to be waited for."""
        loop = asyncio.get_running_loop()
        while self._call is None:
            admission = self._sockets.admission
            call = admission.admit(*self._who)
            if isinstance(call, Full):
                self.end(BUSY, "too many calls wait already")
                await asyncio.Future()  # the socket is closed meanwhile
                return
            try:
                turn = Turn.RUN if call.state is CallState.RUNNING else await call.turn()
                if turn is Turn.RUN:
                    self._call = call
                else:
                    self.end(BUSY, call.error or "the card is still busy with other work")
                    await asyncio.Future()
            finally:
                if self._call is not call:
                    call.finish()
            call.first_byte()
            call.on_cut = self._cut
            if call.cut_reason is not None:
                self._cut()
        self._asked_s = loop.time()
        self._goes_on()

    async def answered(self) -> None:
        """A server's message is about to go down: what it tells unasked, or long after, is no work."""
        if self._call is not None:
            self._goes_on()

    def shut(self) -> None:
        """The gate is shut: who has no work goes, the others once theirs is over."""
        if self._call is None:
            self._leave()

    def end(self, code: int, reason: str) -> None:
        """Have the socket closed. Safe to repeat: the first word counts."""
        if not self.ends.done():
            self.ends.set_result((code, reason))

    def over(self) -> None:
        """The socket is closed: its work is done."""
        if self._timer is not None:
            self._timer.cancel()
        self._rest()

    def _goes_on(self) -> None:
        loop = asyncio.get_running_loop()
        self._until_s = min(loop.time() + self._sockets.quiet_s, self._asked_s + self._sockets.answer_s)
        if self._timer is None:
            self._timer = loop.call_at(self._until_s, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._until_s:
            self._timer = loop.call_at(self._until_s, self._look)
            return
        self._timer = None
        self._rest()
        if not self._sockets.admission.gate(self.tenant).open:
            self._leave()

    def _rest(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.on_cut = None
            call.finish()

    def _cut(self) -> None:
        reason = "" if self._call is None else self._call.cut_reason
        self.end(LEAVES, reason or "the model leaves its card")

    def _leave(self) -> None:
        self.end(LEAVES, "the model leaves its card")


class Sockets:
    """The open sockets of one gateway process. `quiet_s`, `answer_s`: as in the file's head."""

    def __init__(self, admission: Admission, *, quiet_s: float = QUIET_S, answer_s: float = ANSWER_S) -> None:
        self.admission = admission
        self.quiet_s = quiet_s
        self.answer_s = answer_s
        self._open: set[Work] = set()
        admission.on_shut = self.shut

    def opened(self, tenant: str, klass: WorkClass, owner: str, max_wait_ms: int) -> Work:
        """One more; `closed` is to be called, whatever becomes of it."""
        work = Work(self, tenant, klass, owner, max_wait_ms)
        self._open.add(work)
        return work

    def closed(self, work: Work) -> None:
        """That one is no more."""
        self._open.discard(work)
        work.over()

    def shut(self, tenant: str) -> None:
        """The gate of a tenant was shut."""
        for work in [one for one in self._open if one.tenant == tenant]:
            work.shut()

    async def stop(self) -> None:
        """We stop serving."""
        for work in tuple(self._open):
            work.end(WSCloseCode.GOING_AWAY, "swapper stops")
