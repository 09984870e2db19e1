"""Which of the models that are loaded at start are not there yet, and a sentence once each is.

Invariant: a model is said to be there once its server shows it and its gate is open, so that a call is answered, and
of each it is said once. A load that fails is an alert, which the log has already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from swapper.core.spec import Spec
from swapper.core.types import World
from swapper.errors import StoreDown

LOOK_S = 0.5
OBSERVED_S = 1.0
_POLL_S = 0.02
_THERE = frozenset({"loaded", "sleeping"})


class _Seen(Protocol):
    @property
    def states(self) -> Mapping[str, str]: ...


class _Reads(Protocol):
    async def read(self) -> World: ...


class Arrivals:
    """The defaults of `spec`; `absent` are those not seen there at the last look."""

    def __init__(self, spec: Spec) -> None:
        self.absent = [tenant.id for tenant in spec.tenants.values() if tenant.default]

    def look(self, world: World, states: Mapping[str, str]) -> list[str]:
        """What is to be said since the last look."""
        opened = {tenant for tenant, gate in world.gates.items() if gate.open}
        here = [tenant for tenant in self.absent if tenant in opened and states.get(tenant) in _THERE]
        self.absent = [tenant for tenant in self.absent if tenant not in here]
        return [f"{tenant} is loaded and answers" for tenant in here]


async def observed(spec: Spec, seen: _Seen) -> None:
    """Wait until the state of every tenant was told, OBSERVED_S at most: what was loaded before is known then."""
    with suppress(TimeoutError):
        async with asyncio.timeout(OBSERVED_S):
            while True:
                if seen.states.keys() >= spec.tenants.keys():
                    return
                await asyncio.sleep(_POLL_S)


async def watch(arrivals: Arrivals, store: _Reads, seen: _Seen, say: Callable[[str], None]) -> None:
    """Say what becomes of those that are absent, until none is."""
    while arrivals.absent:
        await asyncio.sleep(LOOK_S)
        try:
            world = await store.read()
        except StoreDown:
            continue  # the coordinator says so
        for text in arrivals.look(world, seen.states):
            say(text)
