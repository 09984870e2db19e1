"""The agent's watch: tell the coordinator what is seen, and keep the servers' processes up.

Invariant: level-triggered. What is reported was looked at afresh, whatever woke us, and of two looks at a server the
later one stands; a hint that was lost costs `LOOK_S` at most. It starts servers through their backends and reports;
it never loads or unloads a tenant.

Data of `observed`: `tenants {id: state}`, with those that run and are not configured, `cards {name: reading, MiB}`
(`{unread: why}` of one that could not be read; `lingering`, who left it and lives on), `troubles {server: why}` of
those that could not be started, `contexts {tenant: {model: tokens}}` and `inputs {tenant: {model: [text, image, ..]}}`
where servers tell that, and `marks {card: [token, n]}`: this command and all before it had been carried out on the card
before it was looked at. One that tells what was done to a server has `said`, a sentence, `server`, its name, and `on`,
its cards, instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field

import structlog

from swapper.errors import BackendError
from workers.backend import Backend, Reading, TenantState, Unread
from workers.marks import Pair
from workers.observe import Sight
from workers.supervise import Crash, kept_running, supervised

LOOK_S = 2.0
"""A look at everything at least this often."""
REPEAT_S = 10.0
"""A report at least this often, even when nothing changed."""
START_PAUSE_S = (1.0, 30.0)
"""Between attempts to start a server that does not answer: the first pause, doubling up to the last; none for a server
that had stood for twice the last."""
_SILENT = frozenset({TenantState.STOPPED, TenantState.UNREACHABLE})

log = structlog.stdlib.get_logger(__name__)

Picture = Mapping[str, object]
"""The data of one `observed`."""


@dataclass(slots=True)
class _Seen:
    """What the last look at a server showed. `looks` numbers the looks begun, `shown` is the one that stands.

    `disturbers` are the verbs that change the server just now. `trouble`: why its last start failed.
    """

    backend: Backend
    cards: frozenset[str]
    looks: int = 0
    shown: int = 0
    states: Mapping[str, TenantState] = field(default_factory=dict[str, TenantState])
    marks: Mapping[str, Pair] = field(default_factory=dict[str, Pair])
    disturbers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    silent: asyncio.Event = field(default_factory=asyncio.Event)
    trouble: str | None = None


class Watch:
    """Watches the backends of one host. `mark`: see Marks.carried_out; `report` waits for the store."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        sight: Sight,
        mark: Callable[[str], Pair],
        report: Callable[[Picture], Awaitable[None]],
    ) -> None:
        self._sight = sight
        self._mark = mark
        self._report = report
        self._servers = {server: _Seen(backend, sight.cards_of(server)) for server, backend in backends.items()}
        for seen in self._servers.values():
            seen.marks = dict.fromkeys(seen.cards, (0, 0))  # not looked at yet: older than every command
        self._telling = asyncio.Lock()
        self._told: Picture = {}
        self._told_at = 0.0
        self._untold = False

    async def run(self) -> None:
        """Until cancelled. The first report is made when every server was looked at."""
        await asyncio.gather(*map(self._look_at, self._servers))
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._look_on(server))
                group.create_task(self._listen(server))
                group.create_task(self._keep_up(server))
            while True:
                await self._tell()
                await asyncio.sleep(LOOK_S)

    def again(self) -> None:
        """Tell all that is seen once more: it is not known whether what was told was heard."""
        self._untold = True
        for seen in self._servers.values():
            seen.changed.set()

    @contextmanager
    def undisturbed(self, server: str) -> Generator[None]:
        """Within it hints of the server lead to no look; whoever asks for this looks afterwards."""
        seen = self._servers[server]
        seen.disturbers += 1
        try:
            yield
        finally:
            seen.disturbers -= 1

    async def look(self, server: str) -> None:
        """Look at one server and tell what is new before returning."""
        await self._look_at(server)
        await self._tell()

    @asynccontextmanager
    async def telling(self, server: str) -> AsyncGenerator[Sequence[Picture]]:
        """Look at one server; what is new is the caller's to tell, and nothing else is told meanwhile."""
        await supervised(f"look at {server}", self._look_at(server))
        async with self._telling:
            picture = await self._picture()
            new = picture != self._told or self._untold
            self._untold = False
            yield (picture,) if new else ()
            if new:
                self._note(picture)

    async def _look_at(self, server: str) -> None:
        seen = self._servers[server]
        seen.looks += 1
        look = seen.looks
        marks = {card: self._mark(card) for card in seen.cards}
        states = await self._sight.server(server)
        if look < seen.shown:
            return
        seen.shown, seen.states, seen.marks = look, states, marks
        if states and all(state in _SILENT for state in states.values()):
            seen.silent.set()
        else:
            seen.silent.clear()

    async def _tell(self) -> None:
        """Report what is known, if it is not what was last told or that was too long ago."""
        async with self._telling:
            picture = await self._picture()
            now = asyncio.get_running_loop().time()
            if picture != self._told or self._untold or now - self._told_at >= REPEAT_S:
                self._untold = False
                await self._report(picture)
                self._note(picture)

    def _note(self, told: Picture) -> None:
        self._told, self._told_at = told, asyncio.get_running_loop().time()

    async def _picture(self) -> dict[str, object]:
        """A card that cannot be read is told with the reason, so that no older reading of it is believed."""
        marks = {card: self._mark(card) for card in self._sight.cards}
        states = {tenant: state for seen in self._servers.values() for tenant, state in seen.states.items()}
        cards: dict[str, object] = {}
        for card in self._sight.cards:
            reading = await supervised(f"probe {card}", self._sight.reading(card, states))
            left = [f"pid {holder.pid}" for holder in self._sight.lingering(card)]
            cards[card] = {**_told(reading), **({"lingering": left} if left else {})}
        for seen in self._servers.values():
            marks |= {card: min(mark, marks.get(card, mark)) for card, mark in seen.marks.items()}
        tenants = {tenant: str(state) for tenant, state in states.items()}
        troubles = {server: seen.trouble for server, seen in self._servers.items() if seen.trouble is not None}
        beside = {"contexts": self._sight.contexts(), "inputs": self._sight.inputs()}
        picture = {"tenants": tenants, "cards": cards, "marks": marks, "troubles": troubles}
        return {**picture, **{name: told for name, told in beside.items() if told}}

    async def _look_on(self, server: str) -> None:
        seen = self._servers[server]
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await seen.changed.wait()
            seen.changed.clear()
            await self.look(server)
            await supervised(f"look whether {server} hangs", self._end_hung(server))

    async def _end_hung(self, server: str) -> None:
        seen = self._servers[server]
        try:
            ended = await seen.backend.end_hung()
        except BackendError as error:
            log.warning("what hangs cannot be ended", server=server, error=str(error))
            return
        if ended is not None:
            seen.changed.set()
            log.warning("a server hung", server=server, what=ended)
            await self._report({"said": ended, "server": server, "on": sorted(seen.cards)})

    async def _listen(self, server: str) -> None:
        """Let every change the server tells of lead to a look."""
        seen = self._servers[server]

        async def hear() -> None:
            try:
                async for _ in seen.backend.changes():
                    if not seen.disturbers:
                        seen.changed.set()
            except BackendError as error:
                log.info("the server tells no changes", server=server, error=str(error))

        while True:
            await kept_running(f"listen to {server}", hear)
            await asyncio.sleep(LOOK_S)

    async def _keep_up(self, server: str) -> None:
        """Start the server now, again after one that failed, and whenever none of its tenants can be reached."""
        seen = self._servers[server]
        loop = asyncio.get_running_loop()
        shortest, longest = START_PAUSE_S
        pause = 0.0
        while True:
            started_at = loop.time()
            await self._start(server)
            seen.silent.clear()
            seen.changed.set()
            if seen.trouble is None:
                await seen.silent.wait()
            stood = loop.time() - started_at > 2 * longest
            pause = 0.0 if stood else min(max(pause * 2, shortest), longest)
            await asyncio.sleep(pause)

    async def _start(self, server: str) -> None:
        seen = self._servers[server]
        trouble = await start_of(server, seen.backend)
        if trouble is not None and trouble != seen.trouble:
            log.warning("the server does not start and is tried again", server=server, error=trouble)
        seen.trouble = trouble


async def start_of(server: str, backend: Backend) -> str | None:
    """Start one; why it does not start, in one sentence: that is its own trouble and nobody else's."""

    async def start() -> str | None:
        try:
            await backend.start()
        except BackendError as error:
            return str(error)
        return None

    trouble = await supervised(f"start {server}", start())
    return trouble.text if isinstance(trouble, Crash) else trouble


def _told(reading: Reading | Unread | Crash) -> Mapping[str, object]:
    match reading:
        case Unread(why):
            return {"unread": why}
        case Crash(text):
            return {"unread": text}
        case Reading():
            lists = {"holders": list(reading.holders), "held": [asdict(one) for one in reading.held]}
            return asdict(reading) | lists
