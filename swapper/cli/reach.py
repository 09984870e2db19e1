"""`swapper check` on servers that are no llama-server: what each says of itself, what would fail, and how to mend it.

Invariant: only GET requests that load and wake nothing. A server that swapper starts itself need not answer now.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Mapping

import msgspec

from swapper.config import Config, TenantEntry
from swapper.config.kinds import WHO
from swapper.errors import BackendDown, BackendError, BackendGone, BackendRefused
from workers import llama_swap, ollama
from workers.client import ServerClient, decoded
from workers.sglang import Sglang
from workers.vllm import HOW, Vllm

Found = tuple[bool, str]
"""Whether it is an error, and the sentence."""

_READ_S = 5.0
_DENIED = frozenset({401, 403})


class _Models(msgspec.Struct):
    class Entry(msgspec.Struct):
        id: str

    data: list[Entry]


class _Model(msgspec.Struct):
    enable_sleep_mode: bool | None = None


class _Settings(msgspec.Struct):
    model_config: _Model


class _Arguments(msgspec.Struct):
    """Of vLLM's GET /server_info, where it is one for development."""

    vllm_config: _Settings


async def reach(config: Config, server: str, entry: TenantEntry, environ: Mapping[str, str]) -> list[Found]:
    """Ask the server; what is wrong with it, or with what is written of it."""
    variable = entry.api_key_env or next((one.api_key_env for one in entry.models.values() if one.api_key_env), None)
    key = environ.get(variable) if variable else None
    url = f"tenants.{server}.url"
    http = ServerClient(entry.url or "", WHO[entry.kind], key, read_s=_READ_S)
    try:
        return [one async for one in _asked(config, server, entry, http)]
    except BackendDown as down:
        if entry.control != "attach":
            return []
        why = "nobody listens there" if isinstance(down, BackendGone) else str(down)
        return [(True, f"{url}: {entry.url}: {why}; start the server, or correct the address")]
    except BackendRefused as refused:
        if refused.status in _DENIED:
            mend = "the key in api_key_env is not its" if key else "it wants a key: name its variable in api_key_env"
            return [(True, f"{url}: {refused}; {mend}")]
        return [(True, f"{url}: {refused}; is it {_a(entry)}? correct the address, or the kind")]
    finally:
        await http.close()


def missing_hooks(config: Config, server: str, entry: TenantEntry) -> Iterator[Found]:
    """Programs of hooks that could not be started here."""
    hooks = entry.hooks
    for which in ("before_load", "after_load", "before_release", "after_release"):
        commands: tuple[tuple[str, ...], ...] = getattr(hooks, which)
        for program in {argv[0] for argv in commands}:
            if shutil.which(config.folder / program if "/" in program else program) is None:
                text = f"tenants.{server}.hooks.{which}: {program} is not a program that can be started here"
                yield True, f"{text}; install it, or write its whole path (there is no shell)"


def _a(entry: TenantEntry) -> str:
    return "a server with OpenAI's routes" if entry.kind == "openai" else f"a server of kind {entry.kind}"


def _asked(config: Config, server: str, entry: TenantEntry, http: ServerClient) -> AsyncIterator[Found]:
    match entry.kind:
        case "ollama":
            return _ollama(server, entry, http)
        case "llama-swap":
            return _llama_swap(server, entry, http)
        case "vllm":
            return _vllm(config, server, entry, http)
        case "sglang":
            return _sglang(config, server, entry, http)
        case _:
            return _openai(server, entry, http)


async def _ollama(server: str, entry: TenantEntry, http: ServerClient) -> AsyncIterator[Found]:
    await http.get("/api/ps")
    names = await ollama.names(http)
    for model in entry.models:
        if ollama.same(model) not in map(ollama.same, names):
            has = ", ".join(sorted(names)) or "none"
            text = f"tenants.{server}.models.{model}: Ollama at {http.url} has no such model; it has: {has}"
            yield True, f"{text}; run `ollama pull {model}` there, or correct the name"


async def _llama_swap(server: str, entry: TenantEntry, http: ServerClient) -> AsyncIterator[Found]:
    await http.get("/running")
    names = await llama_swap.listed(http)
    for model in entry.models:
        if model not in names:
            text = f"tenants.{server}.models.{model}: llama-swap at {http.url} lists no such model"
            mend = f"it lists: {', '.join(names) or 'none'}; correct the name, unless it is unlisted there"
            yield False, f"{text} ({mend}; an alias will not do)"


async def _openai(server: str, entry: TenantEntry, http: ServerClient) -> AsyncIterator[Found]:
    try:
        data = await http.get("/v1/models")
    except BackendRefused as refused:
        if refused.status not in (404, 405, 501):
            raise
        yield (
            False,
            f"tenants.{server}: {http.who} at {http.url} lists no models, so nobody can see whether it has these",
        )
        return
    names = [one.id for one in decoded(data, _Models, http.who).data]
    for model in entry.models:
        if model not in names:
            text = f"tenants.{server}.models.{model}: {http.who} at {http.url} has no such model"
            named = ", or start it with --served-model-name" if entry.kind in ("vllm", "sglang") else ""
            yield True, f"{text}; it has: {', '.join(names) or 'none'}; correct the name{named}"


async def _vllm(config: Config, server: str, entry: TenantEntry, http: ServerClient) -> AsyncIterator[Found]:
    async for one in _openai(server, entry, http):
        yield one
    engine, here = Vllm(http, entry.sleep or 1, config.state_dir / "servers" / server), f"tenants.{server}.sleep"
    if entry.sleep is None:
        if await engine.sleeps():
            yield True, f"{here}: vLLM at {http.url} sleeps, and nobody would wake it; write sleep: 1, or wake it there"
    elif not await http.has("/is_sleeping"):
        yield True, f"{here}: vLLM at {http.url} has no sleep endpoints; {HOW}"
    elif await _sleeps_not(http):
        text = f"{here}: vLLM at {http.url} was started without --enable-sleep-mode"
        yield True, f"{text}, so that it would say it sleeps and free nothing; {HOW}"
    if await engine.in_flight() is None:
        text = f"tenants.{server}: vLLM at {http.url} does not tell in /metrics how many calls are in it"
        yield False, f"{text}: calls that do not come through swapper are not waited for; leave out --disable-log-stats"


async def _sleeps_not(http: ServerClient) -> bool:
    """Whether its own arguments say so; older ones do not tell."""
    try:
        data = await http.get("/server_info?config_format=json")
        return decoded(data, _Arguments, http.who).vllm_config.model_config.enable_sleep_mode is False
    except BackendError:
        return False


async def _sglang(config: Config, server: str, entry: TenantEntry, http: ServerClient) -> AsyncIterator[Found]:
    async for one in _openai(server, entry, http):
        yield one
    engine = Sglang(http, entry.sleep or 1, config.state_dir / "servers" / server, lambda: None)
    if entry.sleep is not None:
        try:
            engine.fit(await engine.info())
        except BackendRefused as refused:
            yield True, f"tenants.{server}.sleep: {refused}"
    if await engine.in_flight() is None:
        text = f"tenants.{server}: SGLang at {http.url} does not tell how many calls are in it"
        yield (
            False,
            f"{text}: calls that do not come through swapper are not waited for; start it with --enable-metrics",
        )
