"""Who lives in one router: the configured tenants, and strangers, models it runs that nobody configured.

Invariant: a stranger is known by the id `SERVER/model` from the first look that showed it loading, loaded or asleep,
and is told of as long as this lives, so that whoever heard of it hears of its end. It may be sent away, never brought.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swapper.errors import BackendRefused
from workers.backend import TenantState
from workers.llama.http import Model
from workers.llama.known import state_of


class Roster:
    """`tenants` maps ids to model names. `server` None: the part of those ids before the first slash."""

    def __init__(self, url: str, tenants: Mapping[str, str], server: str | None) -> None:
        self._url = url
        self._tenants = dict(tenants)
        self._configured = frozenset(tenants.values())
        if server is None:
            server = next((tenant.partition("/")[0] for tenant in tenants), None)
        self.server = server or url
        self._prefix = f"{server}/" if server is not None else None
        self._strangers: dict[str, str] = {}
        self._holding: frozenset[str] = frozenset()

    @property
    def tenants(self) -> Mapping[str, str]:
        """The configured ones: ids to model names."""
        return self._tenants

    def has(self, tenant: str) -> bool:
        """Whether it is configured."""
        return tenant in self._tenants

    def configured(self, tenant: str) -> str:
        """The model of a configured tenant; raises BackendRefused for any other."""
        try:
            return self._tenants[tenant]
        except KeyError:
            raise BackendRefused(f"{tenant!r} is no tenant of the router at {self._url}") from None

    def known(self, tenant: str) -> str:
        """The model of a tenant that may be a stranger; raises BackendRefused for one of another server."""
        if tenant not in self._tenants and self._prefix is not None and tenant.startswith(self._prefix):
            return tenant.removeprefix(self._prefix)
        return self.configured(tenant)

    def whose(self, model: str) -> str:
        """The tenant that has a model of the router, by its name there."""
        known = (self._tenants | self._strangers).items()
        return next((tenant for tenant, name in known if name == model), f"{self.server}/{model}")

    def seen(self, models: Mapping[str, Model], state: Callable[[Model | None], TenantState]) -> dict[str, TenantState]:
        """Everybody's state by a fresh `/models`; `models` as RouterHttp gives them, by id and by alias."""
        for model in models.values():
            if self._prefix is not None and state_of(model).holds_vram and not self._has(model):
                self._strangers[self._prefix + model.id] = model.id
        states = {tenant: state(models.get(name)) for tenant, name in (self._strangers | self._tenants).items()}
        self._holding = frozenset(tenant for tenant in self._strangers if states[tenant].holds_vram)
        return states

    def unseen(self, state: Callable[[str], TenantState]) -> dict[str, TenantState]:
        """Everybody's state where the router does not answer, by model name; of strangers, those that held VRAM."""
        gone = {tenant: self._strangers[tenant] for tenant in self._holding}
        return {tenant: state(name) for tenant, name in (gone | self._tenants).items()}

    def _has(self, model: Model) -> bool:
        return not self._configured.isdisjoint({model.id, *model.aliases})
