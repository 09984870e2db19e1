"""What a configured server becomes: its backend, by kind.

Invariant: nothing is started or asked here.
"""

from __future__ import annotations

import os
from typing import Any, cast

from swapper.config import Config
from swapper.config.schema import TenantEntry
from swapper.config.served import served
from workers.backend import Backend
from workers.control import Control
from workers.llama.router import LlamaRouter
from workers.llama.server import LlamaServer
from workers.llama.slots import Keep

MIB = 1024 * 1024


def backend_of(name: str, entry: TenantEntry, config: Config, control: Control) -> Backend:
    """The backend of the server `name`, which `control` starts and stops."""
    url, common = cast("str", entry.url), _common(entry, config)
    if entry.kind == "llama-server":
        ours = entry.control != "attach"
        return LlamaServer(url, tenant=name, control=control, ours=ours, command=entry.command, **common)
    tenants = {one.tenant: one.name for one in served(name, entry)}
    return LlamaRouter(url, tenants=tenants, server=name, control=control, **common)


def _common(entry: TenantEntry, config: Config) -> dict[str, Any]:
    """What both kinds of llama-server take."""
    keep = entry.snapshots
    return {
        "state_dir": config.state_dir,
        "slot_dir": entry.slot_dir if keep.strategy != "off" else None,
        "api_key": os.environ.get(entry.api_key_env) if entry.api_key_env else None,
        "path_map": entry.path_map,
        "folder": config.folder if entry.control == "command" else None,
        "strategy": keep.strategy,
        "keep": Keep(age_ms=keep.keep_ms, bytes=keep.budget_mib * MIB if keep.budget_mib else None),
    }
