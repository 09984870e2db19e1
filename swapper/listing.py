"""What `/v1/models` and `/running` tell of each model before its server does: from the configuration and its files.

Invariant: what is written goes before what files tell; no secret of a command is told. Blocking: reads presets, and the
headers of the model files of those that see, hear, embed or rank.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from presets.options import ModelOptions
from swapper.config import Config
from swapper.config.advice import model_options
from swapper.config.models import ModelEntry
from swapper.config.schema import TenantEntry
from swapper.gateway.listed import ModelInfo, Traits
from workers.llama.fingerprint import local_path
from workers.llama.gguf import GgufIdentities

_SECRET = re.compile(r"(?:^|[-_.])(?:(?:api)?keys?|token|secret|passw(?:or)?d|credentials?)(?:$|[-_.])", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"
_RANK = 4
"""`pooling_type` of a GGUF that ranks."""


def models_of(config: Config, environ: Mapping[str, str]) -> tuple[ModelInfo, ...]:
    """Every model that is called by name, in the order of the file."""
    identities = GgufIdentities(config.state_dir, keep=False)
    served = dict.fromkeys(config.models().values())
    return tuple(one for tenant in served for one in _models(config, tenant, environ, identities))


def shown(command: Iterable[str]) -> str:
    """A command as one line, without what only its owner may know."""
    words: list[str] = []
    secret = False
    for word in command:
        name, sign, _ = word.partition("=")
        if secret and not word.startswith("-"):
            word, secret = _HIDDEN, False
        elif sign and _SECRET.search(name):
            word, secret = f"{name}={_HIDDEN}", False
        else:
            secret = word.startswith("-") and not sign and _SECRET.search(word) is not None
        words.append(_IN_URL.sub(_HIDDEN, word))
    return shlex.join(words)


def _models(config: Config, tenant: str, environ: Mapping[str, str], identities: GgufIdentities) -> Iterator[ModelInfo]:
    server, one = config.served()[tenant]
    entry = config.tenants[server]
    ttl_s = round((config.spec().tenants[tenant].ttl_ms or 0) / 1000)
    command = shown(entry.command) if entry.control == "command" else ""
    options = model_options(config, tenant, environ)
    for model, written in config.entries(tenant).items():
        aliases = tuple(name for name in written.other_names if name != model)
        if not one.models:
            aliases = one.names[1:]
        info = ModelInfo(model, tenant, aliases, ttl_s=ttl_s, command=command, unlisted=written.unlisted)
        told = replace(info, name=written.name or "", description=written.description or "", metadata=written.metadata)
        context = options.context_per_slot() if options else None
        found = _found(config, entry, options, identities) if options else Traits()
        yield replace(told, context_length=written.capabilities.context or context, traits=_traits(written, found))


def _traits(entry: ModelEntry, found: Traits) -> Traits:
    own = entry.capabilities
    inputs, outputs = own.inputs or found.inputs, own.outputs or found.outputs
    if own.inputs is not None and outputs is None:
        outputs = ("text",)
    return Traits(
        inputs,
        outputs if outputs is None or inputs is not None else None,
        tools=bool(own.tools),
        embeddings=found.embeddings if own.embeddings is None else own.embeddings,
        reranker=found.reranker if own.reranker is None else own.reranker,
        written=own.inputs is not None,
    )


def _found(config: Config, entry: TenantEntry, options: ModelOptions, identities: GgufIdentities) -> Traits:
    """What a llama-server's options and its files tell."""

    def fact(option: str, key: str) -> object:
        """Of the header of the file that an option names; `%` in the key is its architecture."""
        named = options.text(option)
        folder = config.folder if entry.control == "command" else None
        facts = None if named is None else identities.facts(local_path(named, entry.path_map, folder))
        return None if facts is None else facts.get(key.replace("%", str(facts.get("general.architecture", ""))))

    ranks = options.flag("reranking", False)
    if not ranks and options.flag("embeddings", False):
        pooling = options.text("pooling")
        ranks = pooling == "rank" if pooling is not None else fact("model", "%.pooling_type") == _RANK
    if ranks or options.flag("embeddings", False):
        return Traits(("text",), None, embeddings=not ranks, reranker=ranks)
    if options.text("mmproj") is None and options.text("mmproj-url") is None:
        return Traits()
    sees, hears = fact("mmproj", "clip.has_vision_encoder"), fact("mmproj", "clip.has_audio_encoder")
    media = [word for word, there in (("image", sees), ("audio", hears)) if there] or ["image"]
    return Traits(("text", *media), ("text",))
