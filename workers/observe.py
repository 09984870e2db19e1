"""What an agent can see: the tenants' states through its backends, the cards' VRAM through its probes.

Invariant: only what a backend or a probe said comes from here, never what a command was meant to do; a server that
does not answer in time makes its tenants `unreachable`. It reads and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from workers.backend import Backend, Probe, Reading, TenantState
from workers.supervise import Crash, supervised
from workers.vram.holders import Holder

OBSERVE_S = 5.0
"""A server that takes longer to say what it holds counts as not answering."""


class TenantPlace(Protocol):
    """Where a tenant lives: all an agent must know of it (core.types.TenantSpec has it)."""

    @property
    def card(self) -> str:
        """The card it holds VRAM on."""
        ...

    @property
    def server(self) -> str:
        """The configured server whose backend has it."""
        ...


class Sight:
    """Looks at the backends (by server name) and probes (by card name) of one host."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        tenants: Mapping[str, TenantPlace],
        probes: Mapping[str, Probe],
    ) -> None:
        self._backends = backends
        self._probes = probes
        self._lingering: dict[str, tuple[Holder, ...]] = {}
        self.tenants = {tenant: place for tenant, place in tenants.items() if place.server in backends}
        self.servers = tuple(backends)
        self.cards = tuple(probes)

    async def server(self, server: str) -> dict[str, TenantState]:
        """State of every tenant of one server."""
        seen = await supervised(f"observe {server}", self._in_time(self._backends[server]))
        states: Mapping[str, TenantState] = {} if isinstance(seen, Crash) else seen
        ours = [tenant for tenant, place in self.tenants.items() if place.server == server]
        return {tenant: states.get(tenant, TenantState.UNREACHABLE) for tenant in ours}

    async def on_card(self, card: str) -> dict[str, TenantState]:
        """State of every tenant of one card."""
        servers = sorted({place.server for place in self.tenants.values() if place.card == card})
        seen: dict[str, TenantState] = {}
        for states in await asyncio.gather(*map(self.server, servers)):
            seen |= states
        return seen

    async def reading(self, card: str, states: Mapping[str, TenantState], holders: Iterable[Holder] = ()) -> Reading:
        """The card's VRAM, MiB, with those tenants of `states` that live on it. Raises what the probe raises."""
        here = {tenant: state for tenant, state in states.items() if self.tenants[tenant].card == card}
        known = (*holders, *self._lingering.get(card, ()))
        return await self._probes[card].read(here, tuple(sorted({h.pid for h in known if h.alive})))

    def linger(self, card: str, holders: Iterable[Holder]) -> None:
        """Departed holders that did not go: every reading of the card counts them while they live."""
        self._lingering[card] = tuple(holders)

    async def _in_time(self, backend: Backend) -> Mapping[str, TenantState]:
        try:
            async with asyncio.timeout(OBSERVE_S):
                return await backend.observe()
        except TimeoutError:
            return {}
