"""What an agent sees: the states of all tenants and the readings of all cards of its host.

Invariant: only what a backend or a probe said stands here, never what a command was meant to do; a server that does
not answer in time makes its tenants `unreachable`. It reads backends and probes and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from workers.backend import Backend, Probe, Reading, TenantState
from workers.supervise import Crash, supervised

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


@dataclass(frozen=True, slots=True)
class Seen:
    """One look: the states, and the data of an `observed` report with them and the cards' readings (MiB)."""

    states: Mapping[str, TenantState]
    data: dict[str, object]


class Sight:
    """Looks at the backends (by server name) and probes (by card name) of one host."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        tenants: Mapping[str, TenantPlace],
        probes: Mapping[str, Probe],
    ) -> None:
        self._backends = backends
        self._tenants = tenants
        self._probes = probes

    async def states(self, card: str | None = None) -> dict[str, TenantState]:
        """State of every tenant, or of those on one card."""
        ours = {t: place for t, place in self._tenants.items() if card is None or place.card == card}
        servers = sorted({place.server for place in ours.values()} & self._backends.keys())
        seen: dict[str, TenantState] = {}
        for states in await asyncio.gather(*map(self._observe, servers)):
            seen |= states
        return {tenant: seen.get(tenant, TenantState.UNREACHABLE) for tenant in ours}

    async def reading(self, card: str, states: Mapping[str, TenantState], holder_pids: Iterable[int] = ()) -> Reading:
        """The card's VRAM; `states` may name tenants of other cards too. Raises what the probe raises."""
        here = {t: state for t, state in states.items() if self._tenants[t].card == card}
        return await self._probes[card].read(here, tuple(holder_pids))

    async def everything(self) -> Seen:
        """All tenants and cards; a card whose probe fails is left out (the log says why)."""
        states = await self.states()
        cards: dict[str, object] = {}
        for card in self._probes:
            reading = await supervised(f"probe {card}", self.reading(card, states))
            if not isinstance(reading, Crash):
                cards[card] = asdict(reading) | {"holders": list(reading.holders)}
        return Seen(states, {"tenants": {tenant: str(state) for tenant, state in states.items()}, "cards": cards})

    async def _observe(self, server: str) -> Mapping[str, TenantState]:
        seen = await supervised(f"observe {server}", self._in_time(self._backends[server]))
        return {} if isinstance(seen, Crash) else seen

    async def _in_time(self, backend: Backend) -> Mapping[str, TenantState]:
        try:
            async with asyncio.timeout(OBSERVE_S):
                return await backend.observe()
        except TimeoutError:
            return {}
