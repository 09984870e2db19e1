"""The configuration as the rest of swapper sees it: the judged document, resolved secrets, and what the core needs.

Invariant: a Config exists only after every check passed (but for those who ask for it unjudged, see `load`); it is
never changed, a reload makes a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swapper.config.keys import ApiKey
from swapper.config.models import ModelEntry
from swapper.config.recipes import recipes
from swapper.config.recipients import Recipient
from swapper.config.schema import (
    CardEntry,
    Document,
    GatewayEntry,
    PolicyEntry,
    TenantEntry,
)
from swapper.config.served import LLAMA, Served, served
from swapper.core.spec import CardSpec, PolicySpec, Spec, TenantSpec
from swapper.core.types import WorkClass
from swapper.core.watched import NeedFrom
from swapper.jobs.recipes import Recipe


@dataclass(frozen=True, slots=True)
class Config:
    """A valid configuration.

    `folder` (absolute) is where relative paths and commands of it start; `path` is its file, None without one.
    `recipients` are told what a person should know. `notices` are sentences about settings that are accepted but that
    this version does not act on, with their lines.
    """

    document: Document
    folder: Path
    path: Path | None
    keys: tuple[ApiKey, ...]
    recipients: tuple[Recipient, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def listen(self) -> tuple[str, int]:
        """Host and port of the API; port 0 lets the system choose."""
        host, _, port = self.document.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def state_dir(self) -> Path:
        """Folder of the embedded store, marks and logs; absolute."""
        return self.document.state_dir

    @property
    def redis(self) -> str | None:
        """Address of an external store; None means the embedded one."""
        return self.document.redis

    @property
    def cards(self) -> Mapping[str, CardEntry]:
        """Cards by name, as configured."""
        return self.document.cards

    @property
    def tenants(self) -> Mapping[str, TenantEntry]:
        """Servers by name, as configured; the tenants of `spec()` are their models, see `served`."""
        return self.document.tenants

    @property
    def policy(self) -> PolicyEntry:
        """The numbers of the policy."""
        return self.document.policy

    @property
    def gateway(self) -> GatewayEntry:
        """Limits of calls by model name."""
        return self.document.gateway

    def recipes(self) -> Mapping[str, Recipe]:
        """What may be submitted as a job, by name."""
        return recipes(self.document, self.folder)

    def served(self) -> Mapping[str, tuple[str, Served]]:
        """Every tenant id -> its server and what is written of it."""
        found = ((server, one) for server, entry in self.tenants.items() for one in served(server, entry))
        return {one.tenant: (server, one) for server, one in found}

    def server_of(self, tenant: str) -> str:
        """The configured server of a tenant id; KeyError when there is none."""
        return self.served()[tenant][0]

    def name_of(self, tenant: str) -> str:
        """What the server of a tenant calls its model; KeyError when there is none."""
        return self.served()[tenant][1].name

    def model(self, tenant: str) -> ModelEntry:
        """The entry of a tenant id; KeyError when there is none."""
        return self.served()[tenant][1].entry

    def entries(self, tenant: str) -> Mapping[str, ModelEntry]:
        """What is written of each model of a tenant, by what its server calls it; KeyError when there is none."""
        server, one = self.served()[tenant]
        return self.tenants[server].models if one.models else {one.name: one.entry}

    def models(self) -> Mapping[str, str]:
        """Every name and alias a caller may use for a model -> its tenant id."""
        return {name: tenant for tenant, (_, one) in self.served().items() for name in one.names}

    def spec(self) -> Spec:
        """What the core needs: cards, tenants (one a model) and the policy's numbers."""
        cards = {
            name: CardSpec(
                name,
                card.vram_mib or 0,
                card.reserve_mib,
                card.host,
                measured=not card.vram_mib,
                foreign_mib=card.foreign_mib,
            )
            for name, card in self.cards.items()
        }
        tenants = {
            tenant: self._tenant(server, one, cards[self.tenants[server].card])
            for tenant, (server, one) in self.served().items()
        }
        return Spec(cards, tenants, self._policy())

    def _tenant(self, server: str, found: Served, card: CardSpec) -> TenantSpec:
        entry, one = self.tenants[server], found.entry
        return TenantSpec(
            id=found.tenant,
            server=server,
            card=entry.card,
            host=card.host,
            need_mib=one.vram_mib if isinstance(one.vram_mib, int) else card.whole_mib,
            takes_all=not isinstance(one.vram_mib, int),
            need_from=NeedFrom.UNKNOWN if one.vram_mib is None else NeedFrom.DECLARED,
            on_over=one.on_over or entry.on_over,
            ttl_ms=one.ttl_ms,
            kind=entry.kind,
            evict_never=entry.evict == "never",
            default=one.default,
            by_lease=entry.kind == "comfyui",
            serves_models=bool(found.names),
            save=entry.kind in LLAMA and entry.snapshots.strategy != "off",
            save_required=entry.snapshots.required,
            sweep=entry.snapshots.sweep,
            every_ms=entry.snapshots.every_ms,
        )

    def _policy(self) -> PolicySpec:
        policy = self.policy
        drain = {
            WorkClass.INTERACTIVE: policy.drain.interactive_ms,
            WorkClass.NORMAL: policy.drain.normal_ms,
            WorkClass.BATCH: policy.drain.batch_ms,
            WorkClass.MAINTENANCE: policy.drain.normal_ms,
        }
        return PolicySpec(
            drain_ms=drain,
            on_drain_limit=policy.on_drain_limit,
            grace_ms=policy.grace_ms,
            idle_restore_ms=policy.idle_restore_ms,
            max_hold_ms=policy.max_hold_ms,
            max_queue=policy.max_queue,
        )


def tenant_id(server: str, model: str) -> str:
    """Id of a model of a server."""
    return f"{server}/{model}"
