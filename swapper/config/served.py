"""Who lives on a configured server: its tenants, what the server and its callers call them, and where that is written.

Invariant: pure over the document. A server that loads and unloads its models one by one has a tenant for each,
`SERVER/MODEL`; any other is its only tenant, under its own name, whatever it serves.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapper.config.models import ModelEntry
from swapper.config.schema import TenantEntry
from swapper.config.yamltext import Loc

ONE_MODEL = frozenset({"llama-server"})
"""Kinds of llama-server whose server is its tenant."""
LLAMA = ONE_MODEL | {"llama-router"}
"""Kinds with slots, whose conversations are kept."""
WHOLE = frozenset({"openai", "vllm", "sglang"})
"""Kinds whose server is its tenant and may serve several names."""


@dataclass(frozen=True, slots=True)
class Served:
    """One tenant. `name`: its model at the server; `names`: all that callers may use; `loc`: where `entry` stands.

    `models`: every model of the server that is this tenant, as it calls it, with the further names callers may use.
    """

    tenant: str
    name: str
    entry: ModelEntry
    names: tuple[str, ...]
    loc: Loc
    models: tuple[tuple[str, tuple[str, ...]], ...] = ()


def served(server: str, entry: TenantEntry) -> tuple[Served, ...]:
    """The tenants of a server, in the file's order. Of a plain one's models only the first counts."""
    here: Loc = ("tenants", server)
    if entry.kind in ("none", "comfyui"):  # nobody calls it by a model's name
        otherwise = "all" if entry.kind == "comfyui" else None
        only = ModelEntry().model_copy(update={"vram_mib": entry.vram_mib or otherwise})
        return (Served(server, server, only, (), here),)
    if entry.kind in WHOLE:
        return (_whole(server, entry, here),)
    if entry.kind not in ONE_MODEL:
        return tuple(
            Served(f"{server}/{model}", model, one, _called(model, one), (*here, "models", model))
            for model, one in entry.models.items()
        )
    for model, one in entry.models.items():
        whole = one if one.vram_mib is not None else one.model_copy(update={"vram_mib": entry.vram_mib})
        names = tuple(dict.fromkeys((model, server, *one.other_names)))
        return (Served(server, model, whole, names, (*here, "models", model)),)
    return (Served(server, server, ModelEntry().model_copy(update={"vram_mib": entry.vram_mib}), (server,), here),)


def _called(model: str, one: ModelEntry) -> tuple[str, ...]:
    return tuple(dict.fromkeys((model, *one.other_names)))


def _whole(server: str, entry: TenantEntry, here: Loc) -> Served:
    """All that a server serves is there or not, together: it needs the sum, and is a default if one of them is.

    It leaves once none of them was called for as long as theirs say; one without a ttl keeps it.
    """
    models = tuple((model, _called(model, one)[1:]) for model, one in entry.models.items())
    entries = tuple(entry.models.values())
    first = next(iter(entry.models), server)
    needs = [one.vram_mib for one in entries if one.vram_mib is not None] or [entry.vram_mib]
    need = "all" if "all" in needs else sum(need for need in needs if isinstance(need, int)) or None
    known = len(needs) == max(1, len(entries)) or entry.vram_mib is not None
    limits = [one.concurrency for one in entries if one.concurrency is not None]
    ttls = [one.ttl_ms for one in entries if one.ttl_ms is not None]
    together = {
        "vram_mib": need if known else None,
        "aliases": tuple(name for one in entries for name in one.other_names),
        "default": any(one.default for one in entries),
        "concurrency": sum(limits) if limits and len(limits) == len(entries) else None,
        "api_key_env": next((one.api_key_env for one in entries if one.api_key_env), None),
        "ttl_ms": max(ttls) if ttls and len(ttls) == len(entries) else None,
        "on_over": next((one.on_over for one in entries if one.on_over), None),
    }
    names = tuple(dict.fromkeys(name for model, aliases in models for name in (model, *aliases)))
    loc: Loc = (*here, "models", first) if entry.models else here
    whole = ModelEntry().model_copy(update=together)
    return Served(server, first, whole, tuple(dict.fromkeys((*names, server))), loc, models)
