"""What an agent can see: the tenants' states through its backends, the cards' VRAM through its probes.

Invariant: only what a backend or a probe said comes from here, never what a command was meant to do; a server that
does not answer in time makes its tenants `unreachable`. Strangers, tenants that a backend sees and nobody configured,
are carried through like any other, on every card of their server. It reads and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from workers.backend import Backend, Owners, Probe, Processes, Reading, Sensing, Sized, TenantState, Unread
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
        self._strangers: dict[str, Mapping[str, TenantState]] = {}
        self.tenants = {tenant: place for tenant, place in tenants.items() if place.server in backends}
        self.servers = tuple(backends)
        self.cards = tuple(probes)

    def server_of(self, tenant: str) -> str | None:
        """The server that has a tenant, by its place or else by its id, `SERVER/...`; None where no backend has it."""
        place = self.tenants.get(tenant)
        server = place.server if place is not None else tenant.partition("/")[0]
        return server if server in self._backends else None

    def cards_of(self, server: str) -> frozenset[str]:
        """The cards of a server's configured tenants; where it has none, it may hold VRAM on any."""
        return frozenset(p.card for p in self.tenants.values() if p.server == server) or frozenset(self.cards)

    async def server(self, server: str) -> dict[str, TenantState]:
        """State of every tenant of one server; where it does not answer, of those strangers too that held VRAM."""
        seen = await supervised(f"observe {server}", self._in_time(self._backends[server]))
        ours = [tenant for tenant, place in self.tenants.items() if place.server == server]
        if seen is None or isinstance(seen, Crash):
            held = [t for t, state in self._strangers.get(server, {}).items() if state.holds_vram]
            return dict.fromkeys([*ours, *held], TenantState.UNREACHABLE)
        strangers = self._strangers[server] = {t: state for t, state in seen.items() if t not in self.tenants}
        return {tenant: seen.get(tenant, TenantState.UNREACHABLE) for tenant in ours} | strangers

    async def on_card(self, card: str) -> dict[str, TenantState]:
        """State of every tenant of one card."""
        servers = sorted(server for server in self.servers if card in self.cards_of(server))
        seen: dict[str, TenantState] = {}
        for states in await asyncio.gather(*map(self.server, servers)):
            seen |= states
        return seen

    async def reading(
        self, card: str, states: Mapping[str, TenantState], holders: Iterable[Holder] = ()
    ) -> Reading | Unread:
        """The card's VRAM, MiB, with those tenants of `states` that live on it. Raises what the probe raises."""
        here = {tenant: state for tenant, state in states.items() if card in self._cards(tenant)}
        known = (*holders, *self._lingering.get(card, ()))
        return await self._probes[card].read(here, tuple(sorted({h.pid for h in known if h.alive})), self.owners())

    def owners(self) -> Owners:
        """Whose the processes of this host are, as far as its backends know."""
        known = [backend.processes() for backend in self._backends.values() if isinstance(backend, Processes)]
        pids = {pid: whose for one in known for pid, whose in one.pids.items()}
        return Owners(pids, {box: whose for one in known for box, whose in one.containers.items()})

    def contexts(self) -> dict[str, Mapping[str, int]]:
        """Tokens that a call may have, by tenant and model, as far as their servers have told."""
        known = [backend.contexts() for backend in self._backends.values() if isinstance(backend, Sized)]
        return {tenant: dict(told) for one in known for tenant, told in one.items()}

    def inputs(self) -> dict[str, Mapping[str, Sequence[str]]]:
        """What their models take, by tenant and model, as far as their servers have told."""
        known = [backend.inputs() for backend in self._backends.values() if isinstance(backend, Sensing)]
        return {tenant: dict(told) for one in known for tenant, told in one.items()}

    def linger(self, card: str, holders: Iterable[Holder]) -> None:
        """Departed holders not seen gone: every reading of the card counts them while they live."""
        self._lingering[card] = tuple(holders)

    def lingering(self, card: str) -> tuple[Holder, ...]:
        """Those of them that still live."""
        return tuple(holder for holder in self._lingering.get(card, ()) if holder.alive)

    def _cards(self, tenant: str) -> frozenset[str]:
        place = self.tenants.get(tenant)
        return frozenset({place.card}) if place is not None else self.cards_of(tenant.partition("/")[0])

    async def _in_time(self, backend: Backend) -> Mapping[str, TenantState] | None:
        try:
            async with asyncio.timeout(OBSERVE_S):
                return await backend.observe()
        except TimeoutError:
            return None
