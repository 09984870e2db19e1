"""Who lives in a server that loads and unloads its models itself: the configured tenants, and strangers.

Invariant: a stranger is known by the id `SERVER/model` from the first look that showed it holding VRAM, and is told of
as long as this lives, so that whoever heard of it hears of its end. It may be sent away, never brought.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swapper.errors import BackendRefused
from workers.backend import TenantState


def _as_written(name: str) -> str:
    return name


class Lodgers:
    """`tenants` maps ids to model names; `same` gives two names of one model the same text."""

    def __init__(
        self, who: str, server: str, tenants: Mapping[str, str], same: Callable[[str], str] = _as_written
    ) -> None:
        self._who = who
        self._prefix = f"{server}/"
        self._tenants = dict(tenants)
        self._same = same
        self._strangers: dict[str, str] = {}
        self._holding: frozenset[str] = frozenset()

    def configured(self, tenant: str) -> str:
        """The model of a configured tenant; raises BackendRefused for any other."""
        try:
            return self._tenants[tenant]
        except KeyError:
            raise BackendRefused(f"{tenant!r} is no tenant of {self._who}") from None

    def called(self, name: str) -> list[tuple[str, str]]:
        """The configured tenants (and what they call their model) that the server's name of a model means."""
        return [(t, model) for t, model in self._tenants.items() if self._same(model) == self._same(name)]

    def known(self, tenant: str) -> str:
        """The model of a tenant that may be a stranger; raises BackendRefused for one of another server."""
        if tenant not in self._tenants and tenant.startswith(self._prefix):
            return tenant.removeprefix(self._prefix)
        return self.configured(tenant)

    def state(self, name: str, running: Mapping[str, TenantState]) -> TenantState:
        """A model's state by what the server says it runs."""
        same = {self._same(one): state for one, state in running.items()}
        return same.get(self._same(name), TenantState.UNLOADED)

    def seen(self, running: Mapping[str, TenantState]) -> dict[str, TenantState]:
        """Everybody's state by what the server says it runs."""
        ours = {self._same(name) for name in self._tenants.values()}
        for name, state in running.items():
            if state.holds_vram and self._same(name) not in ours:
                self._strangers[self._prefix + name] = name
        states = {tenant: self.state(name, running) for tenant, name in (self._strangers | self._tenants).items()}
        self._holding = frozenset(tenant for tenant in self._strangers if states[tenant].holds_vram)
        return states

    def unseen(self, state: TenantState) -> dict[str, TenantState]:
        """Everybody is in this state, for the server does not answer; of strangers, those that held VRAM."""
        return dict.fromkeys((*self._holding, *self._tenants), state)
