"""What a configured server becomes: its backend, by kind.

Invariant: nothing is started or asked here.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

from swapper.config import Config
from swapper.config.schema import TenantEntry
from swapper.config.served import LLAMA, WHOLE, Served, served
from swapper.estimates import sleeping_mib
from workers.backend import Backend, Owners
from workers.client import ServerClient
from workers.comfyui.server import ComfyUI
from workers.control import Control, Watched
from workers.control.process import WatchedProcess
from workers.hooks import Hooked, Hooks
from workers.hostram import HostRam
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer
from workers.llama.slots import Keep
from workers.llama_swap import LlamaSwap
from workers.ollama import Ollama
from workers.onoff import OnOff
from workers.openai import Engine, OpenAiServer
from workers.sglang import WHO as SGLANG
from workers.sglang import Sglang
from workers.vllm import WHO as VLLM
from workers.vllm import Vllm

MIB = 1024 * 1024

Held = Callable[[str, Owners], Awaitable[int | None]]
"""What a tenant's own processes have of its card, MiB; None: that cannot be known."""


def backend_of(name: str, entry: TenantEntry, config: Config, control: Control, held: Held | None = None) -> Backend:
    """The backend of the server `name`, which `control` starts and stops, with its hooks around it."""
    if entry.kind == "comfyui":
        backend = _comfyui(name, entry, config, control, held)
    else:
        backend = _llama(name, entry, config, control) if entry.kind in LLAMA else _other(name, entry, config, control)
    hooks = Hooks(
        before_load=entry.hooks.before_load,
        after_load=entry.hooks.after_load,
        before_release=entry.hooks.before_release,
        after_release=entry.hooks.after_release,
        timeout_ms=entry.hooks.timeout_ms,
        fails=entry.hooks.on_failure == "fail",
    )
    return Hooked(backend, hooks, config.folder) if hooks else backend


def api_key(entry: TenantEntry, one: Served | None = None) -> str | None:
    """The key of a server, or of one of its models where that has its own."""
    variable = (one.entry.api_key_env if one is not None else None) or entry.api_key_env
    return os.environ.get(variable) if variable else None


def _llama(name: str, entry: TenantEntry, config: Config, control: Control) -> Backend:
    url, common = cast("str", entry.url), _common(entry, config)
    if entry.kind == "llama-server":
        ours = entry.control != "attach"
        model = served(name, entry)[0].name
        own = {"tenant": name, "model": model, "control": control, "ours": ours, "command": entry.command}
        return LlamaServer(url, **own, **common)
    tenants = {one.tenant: one.name for one in served(name, entry)}
    return LlamaRouter(url, tenants=tenants, server=name, control=control, **common)


def _other(name: str, entry: TenantEntry, config: Config, control: Control) -> Backend:
    if entry.kind == "none":
        return _on_off(name, entry, config, control)
    url, ours, tenants = cast("str", entry.url), entry.control != "attach", served(name, entry)
    if entry.kind in WHOLE:
        return _whole(name, entry, config, control, tenants[0])
    common: dict[str, Any] = {
        "server": name,
        "tenants": {one.tenant: one.name for one in tenants},
        "control": control,
        "ours": ours,
        "api_key": api_key(entry),
        "keys": {one.tenant: key for one in tenants if one.entry.api_key_env and (key := api_key(entry, one))},
    }
    if entry.kind == "ollama":
        return Ollama(url, keep_alive_ms=entry.keep_alive_ms, **common)
    return LlamaSwap(url, **common)


def _on_off(name: str, entry: TenantEntry, config: Config, control: Control) -> Backend:
    watched = control if isinstance(control, Watched) else WatchedProcess(control)
    away = config.state_dir / "servers" / name / "released.json"
    return OnOff(name, watched, grace_ms=entry.grace_ms, keep_up=entry.evict == "never", away=away)


def _comfyui(name: str, entry: TenantEntry, config: Config, control: Control, held: Held | None) -> Backend:
    watched = control if isinstance(control, Watched) else WatchedProcess(control)

    async def held_mib() -> int | None:
        return None if held is None else await held(name, backend.processes())

    backend = ComfyUI(
        cast("str", entry.url),
        tenant=name,
        control=watched,
        ours=entry.control != "attach",
        marker=config.state_dir / "servers" / name / "loaded.json",
        grace_ms=entry.grace_ms,
        held_mib=held_mib,
    )
    return backend


def _whole(name: str, entry: TenantEntry, config: Config, control: Control, one: Served) -> Backend:
    """Of a server that is its own tenant."""
    who = {"vllm": VLLM, "sglang": SGLANG}.get(entry.kind, "the server")
    http = ServerClient(cast("str", entry.url), who, api_key(entry, one))
    folder = config.state_dir / "servers" / name
    kept, ram = sleeping_mib(entry), HostRam({}, floor_mib=config.policy.ram_floor_mib)
    engine: Engine | None = None
    if entry.kind == "vllm":
        engine = Vllm(http, entry.sleep or 1, folder)
    elif entry.kind == "sglang":
        engine = Sglang(http, entry.sleep or 1, folder, lambda: backend.run())
    backend = OpenAiServer(
        http,
        tenant=name,
        models=[model for model, _ in one.models] or [one.name],
        control=control,
        ours=entry.control != "attach",
        engine=engine,
        rests=entry.sleep is not None,
        no_room=lambda: ram.short(kept, f"putting {name} to sleep") if kept else None,
    )
    return backend


def _common(entry: TenantEntry, config: Config) -> dict[str, Any]:
    """What both kinds of llama-server take."""
    keep = entry.snapshots
    return {
        "state_dir": config.state_dir,
        "slot_dir": entry.slot_dir if keep.strategy != "off" else None,
        "api_key": api_key(entry),
        "path_map": entry.path_map,
        "folder": config.folder if entry.control == "command" else None,
        "strategy": keep.strategy,
        "keep": Keep(age_ms=keep.keep_ms, bytes=keep.budget_mib * MIB if keep.budget_mib else None),
    }
