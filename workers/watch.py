"""The agent's watch: tell the coordinator what changed, and keep the servers' processes up.

Invariant: level-triggered. What is reported is a fresh look at everything, whatever woke us; a hint that was lost costs
`LOOK_S` at most. It starts servers through their backends and reports; it never loads or unloads a tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import structlog

from swapper.errors import BackendError
from workers.backend import Backend, TenantState
from workers.observe import Sight, TenantPlace
from workers.supervise import kept_running, supervised

LOOK_S = 2.0
"""A look at everything at least this often."""
REPEAT_S = 10.0
"""A report at least this often, even when nothing changed."""
START_PAUSE_S = (1.0, 30.0)
"""Between two attempts to start a server that does not answer: the first pause, doubling up to the last."""

log = structlog.stdlib.get_logger("swapper.agent")

Volunteer = Callable[[str, Mapping[str, object]], Awaitable[None]]


class Watch:
    """Watches the backends of one host; `report` delivers an `observed` and waits for the store as long as it takes."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        tenants: Mapping[str, TenantPlace],
        sight: Sight,
        report: Volunteer,
    ) -> None:
        self._backends = backends
        self._tenants = tenants
        self._sight = sight
        self._report = report
        self._changed = asyncio.Event()
        self._silent = {server: asyncio.Event() for server in backends}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server, backend in self._backends.items():
                group.create_task(self._listen(server, backend))
                group.create_task(self._keep_up(server, backend))
            await self._look_on()

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        sent: dict[str, object] = {}
        sent_at = loop.time()
        while True:
            self._changed.clear()
            seen = await self._sight.everything()
            self._note_silence(seen.states)
            if seen.data != sent or loop.time() - sent_at >= REPEAT_S:
                await self._report("observed", seen.data)
                sent, sent_at = seen.data, loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    def _note_silence(self, states: Mapping[str, TenantState]) -> None:
        for server, silent in self._silent.items():
            ours = [state for tenant, state in states.items() if self._tenants[tenant].server == server]
            if ours and all(state == TenantState.UNREACHABLE for state in ours):
                silent.set()
            else:
                silent.clear()

    async def _listen(self, server: str, backend: Backend) -> None:
        """Let every change the server tells of lead to a look."""

        async def hear() -> None:
            try:
                async for _ in backend.changes():
                    self._changed.set()
            except BackendError as error:
                log.info("the server tells no changes", server=server, error=str(error))

        while True:
            await kept_running(f"listen to {server}", hear)
            await asyncio.sleep(LOOK_S)

    async def _keep_up(self, server: str, backend: Backend) -> None:
        """Start the server now, and again whenever none of its tenants can be reached."""
        loop = asyncio.get_running_loop()
        shortest, longest = START_PAUSE_S
        pause = shortest / 2
        while True:
            started_at = loop.time()
            await supervised(f"start {server}", self._start(server, backend))
            self._changed.set()
            self._silent[server].clear()
            await self._silent[server].wait()
            pause = shortest if loop.time() - started_at > 2 * longest else min(pause * 2, longest)
            await asyncio.sleep(pause)

    async def _start(self, server: str, backend: Backend) -> None:
        try:
            await backend.start()
        except BackendError as error:
            log.warning("the server does not start", server=server, error=str(error))
