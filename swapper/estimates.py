"""What the tenants will take whose `vram` nobody wrote, from their model files, until it was measured.

Invariant: reads presets and the headers of model files, changes nothing. Blocking.
"""

from __future__ import annotations

from collections.abc import Mapping

from swapper.config import Config
from swapper.config.advice import model_options
from swapper.config.units import show_mib
from swapper.core.watched import NeedFrom
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
