"""What the tenants will take whose `vram` nobody wrote, from their model files, until it was measured.

Invariant: reads presets and the headers of model files, changes nothing. Blocking.
"""

from __future__ import annotations

from collections.abc import Mapping

from swapper.config import Config
from swapper.config.advice import model_options
from swapper.config.schema import TenantEntry
from swapper.config.served import LLAMA, WHOLE
from swapper.config.units import show_mib
from swapper.core.watched import NeedFrom
from workers.backend import Unread
from workers.hostram import available
from workers.llama.estimate import Estimate, estimate
from workers.llama.fingerprint import local_path
from workers.llama.gguf import GgufIdentities

_BESIDE = ("mmproj", "model-draft", "spec-draft-model")
"""Files that are loaded beside the model's own."""


def estimates(config: Config, environ: Mapping[str, str]) -> Mapping[str, Estimate | None]:
    """By tenant id, of those without `vram`; None where its file cannot be read here, or does not tell enough."""
    identities = GgufIdentities(config.state_dir, keep=False)
    unknown = [t.id for t in config.spec().tenants.values() if t.need_from is NeedFrom.UNKNOWN]
    return {tenant: _estimate(config, tenant, environ, identities) for tenant in unknown}


def thought(config: Config, environ: Mapping[str, str]) -> Mapping[str, int]:
    """MiB of those that could be estimated."""
    return {tenant: one.mib for tenant, one in estimates(config, environ).items() if one is not None}


def rams(config: Config, environ: Mapping[str, str]) -> Mapping[str, int]:
    """MiB of the machine's memory that each load takes, by tenant id; those that take none are left out.

    What is written (`ram`), else what stays there of a llama-server's model whose options keep a part off the card.
    """
    identities = GgufIdentities(config.state_dir, keep=False)
    found: dict[str, int] = {}
    for tenant, (server, one) in config.served().items():
        entry = config.tenants[server]
        models = [m.ram_mib for m in entry.models.values() if m.ram_mib is not None] if entry.kind in WHOLE else []
        own = sum(models) if models else one.entry.ram_mib
        written = entry.ram_mib if own is None else own
        if entry.sleep == 1:
            continue  # asked for before it sleeps
        if written is None and entry.kind in LLAMA and _in_part(config, tenant, environ):
            guess = _estimate(config, tenant, environ, identities)
            written = None if guess is None else guess.host_mib
        if written:
            found[tenant] = written
    return found


def too_large(config: Config, environ: Mapping[str, str]) -> list[str]:
    """A sentence each about those here that take more of the machine's memory than it can ever give."""
    memory, floor_mib = available(), config.policy.ram_floor_mib
    if isinstance(memory, Unread):
        return []
    here = {name for name, card in config.cards.items() if card.host == "main"}
    asleep = {name: sleeping_mib(entry) for name, entry in config.tenants.items()}
    needs = {**rams(config, environ), **{name: mib for name, mib in asleep.items() if mib}}
    has = f"which has {show_mib(memory.total_mib)} and is to keep {show_mib(floor_mib)} (policy.ram_floor)"
    return [
        f"{tenant} takes {show_mib(mib)} of the machine's memory, {has}: it would never "
        f"{'sleep' if asleep.get(tenant) else 'be loaded'}; "
        "write ram: SIZE where it takes less, or use a smaller model"
        for tenant, mib in needs.items()
        if mib + floor_mib > memory.total_mib and config.tenants[config.server_of(tenant)].card in here
    ]


def _in_part(config: Config, tenant: str, environ: Mapping[str, str]) -> bool:
    options = model_options(config, tenant, environ)
    chosen = options.number("n-gpu-layers") if options is not None else None
    return chosen is not None and chosen >= 0


def sleeping_mib(entry: TenantEntry) -> int:
    """MiB of the machine's memory that a server with `sleep: 1` takes while it sleeps; 0 where that is not known.

    What is written (`ram`), else its `vram`, for its weights are no more than that.
    """
    needs = [one.vram_mib for one in entry.models.values() if isinstance(one.vram_mib, int)]
    vram = entry.vram_mib if isinstance(entry.vram_mib, int) else sum(needs)
    models = [one.ram_mib for one in entry.models.values() if one.ram_mib is not None]
    written = sum(models) if models else entry.ram_mib
    kept = vram if written is None else written
    return kept if entry.sleep == 1 else 0


def _estimate(config: Config, tenant: str, environ: Mapping[str, str], identities: GgufIdentities) -> Estimate | None:
    entry = config.tenants[config.server_of(tenant)]
    options = model_options(config, tenant, environ)
    named = options.text("model") if options is not None else None
    if options is None or named is None:
        return None
    folder = config.folder if entry.control == "command" else None
    path = local_path(named, entry.path_map, folder)
    facts, known = identities.facts(path), identities.identity(path)
    if facts is None or not known.size:
        return None
    others = (local_path(text, entry.path_map, folder) for name in _BESIDE if (text := options.text(name)))
    return estimate(options, known.size + sum(identities.identity(other).size for other in others), facts)


def told(tenant: str, one: Estimate | None) -> str:
    """One sentence for people."""
    if one is None:
        why = "its model file cannot be read here, or does not tell enough"
        return f"{tenant}: no vram is written and {why}, so that it counts as the whole card until it was measured"
    parts = f"weights {show_mib(one.weights_mib)}, {one.n_ctx:,} tokens of context {show_mib(one.cache_mib)}"
    rest = f"{show_mib(one.beside_mib)} beside"
    return f"{tenant}: no vram is written; {show_mib(one.mib)} is estimated until it was measured ({parts}, {rest})"
