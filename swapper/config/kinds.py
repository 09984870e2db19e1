"""What may stand under a tenant whose kind is another server's than llama.cpp's, and what would not work.

Invariant: pure over the document and the environment; gives every problem at once, as (path, sentence).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from swapper.config.schema import CardEntry, TenantEntry
from swapper.config.served import WHOLE
from swapper.config.yamltext import Loc

Said = tuple[Loc, str]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a server is called, the keys of its own, and the address to show."""

    who: str
    keys: frozenset[str]
    like: str


_KINDS = {
    "ollama": _Kind("Ollama", frozenset({"keep_alive"}), "http://127.0.0.1:11434"),
    "llama-swap": _Kind("llama-swap", frozenset(), "http://127.0.0.1:8080"),
    "vllm": _Kind("vLLM", frozenset({"sleep", "vram"}), "http://127.0.0.1:8000"),
    "sglang": _Kind("SGLang", frozenset({"sleep", "vram"}), "http://127.0.0.1:30000"),
    "openai": _Kind("server", frozenset({"vram"}), "http://127.0.0.1:9000"),
}
SERVED = frozenset(_KINDS)
WHO = {name: kind.who for name, kind in _KINDS.items()}
KEYS = {name: frozenset({"command", "url", "api_key_env", "models"}) | kind.keys for name, kind in _KINDS.items()}
"""Keys of each kind, beside those of every tenant."""


def check(entry: TenantEntry, loc: Loc, environ: Mapping[str, str]) -> Iterator[Said]:
    """Problems of one tenant of these kinds."""
    kind = _KINDS[entry.kind]
    if entry.url is None:
        yield loc, f"needs url: the address of the {kind.who}, like {kind.like}"
    if entry.control == "command" and not entry.command:
        yield loc, "control: command needs command: the server's program and its arguments"
    if entry.control == "attach" and entry.command:
        yield (*loc, "command"), "is never run with control: attach; write control: command, or remove it"
    if not entry.models:
        yield loc, f"needs models: the names that the {kind.who} serves, each with its vram"
    for place, variable in _variables(entry, loc):
        if variable is not None and not environ.get(variable):
            yield place, f"the environment variable {variable} is not set"
    if entry.kind in WHOLE:
        yield from _whole(entry, loc)


def _whole(entry: TenantEntry, loc: Loc) -> Iterator[Said]:
    if entry.control == "attach" and entry.evict != "never" and entry.sleep is None:
        rest = " sleep: 1," if entry.kind in ("vllm", "sglang") else ""
        said = f"cannot be ended with control: attach; write{rest} control: command, or evict: never"
        yield (*loc, "control"), said
    if entry.vram_mib is not None and any(one.vram_mib is not None for one in entry.models.values()):
        yield (*loc, "vram"), "stands with its models as well; write it once"
    keys = {one.api_key_env for one in entry.models.values()}
    if len(keys) > 1:
        yield (*loc, "models"), "are one server's and have several keys; write api_key_env once, beside url"


def _variables(entry: TenantEntry, loc: Loc) -> Iterator[tuple[Loc, str | None]]:
    yield (*loc, "api_key_env"), entry.api_key_env
    for name, one in entry.models.items():
        yield (*loc, "models", name, "api_key_env"), one.api_key_env


def notices(entry: TenantEntry, given: Mapping[str, object], loc: Loc, card: CardEntry | None) -> Iterator[Said]:
    """What is accepted and had better be known; `given` is what stands in the file."""
    if entry.kind == "openai" and entry.control == "attach" and "evict" not in given:
        said = "nothing here can end it, so it keeps its place as with evict: never"
        yield loc, f"{said}; write that, or control: command and how it is started"
    if entry.sleep is not None and card is not None and not card.reserve_mib:
        said = "what it keeps while it sleeps (graphs, context, buffers: often 1 GiB a GPU and more) counts for nobody"
        yield (*loc, "sleep"), f"{said}: add it to the reserve of card {entry.card}"
