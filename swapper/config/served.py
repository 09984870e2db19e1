"""Who lives on a configured server: its tenants, what the server and its callers call them, and where that is written.

Invariant: pure over the document. A server of many models has a tenant for each, `SERVER/MODEL`; a plain llama-server
is its only tenant, under its own name.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapper.config.schema import ModelEntry, TenantEntry
from swapper.config.yamltext import Loc

ONE_MODEL = frozenset({"llama-server"})
"""Kinds whose server is its tenant."""


@dataclass(frozen=True, slots=True)
class Served:
    """One tenant. `name`: its model at the server; `names`: all that callers may use; `loc`: where `entry` stands."""

    tenant: str
    name: str
    entry: ModelEntry
    names: tuple[str, ...]
    loc: Loc


def served(server: str, entry: TenantEntry) -> tuple[Served, ...]:
    """The tenants of a server, in the file's order. Of a plain one's models only the first counts."""
    here: Loc = ("tenants", server)
    if entry.kind not in ONE_MODEL:
        return tuple(
            Served(f"{server}/{model}", model, one, (model, *one.aliases), (*here, "models", model))
            for model, one in entry.models.items()
        )
    for model, one in entry.models.items():
        whole = one if one.vram_mib is not None else one.model_copy(update={"vram_mib": entry.vram_mib})
        names = tuple(dict.fromkeys((model, server, *one.aliases)))
        return (Served(server, model, whole, names, (*here, "models", model)),)
    return (Served(server, server, ModelEntry().model_copy(update={"vram_mib": entry.vram_mib}), (server,), here),)
