"""`swapper check` on whoever starts and stops a server: is it reached, does it know the thing, may we act on it.

Invariant: looks, and starts and stops nothing.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from swapper.config import Config, TenantEntry
from swapper.controls import control_of
from workers.control.docker import DockerControl


@runtime_checkable
class _Examined(Protocol):
    """A control that can say beforehand what would fail."""

    async def problems(self) -> list[str]: ...

    async def close(self) -> None: ...


async def managed(config: Config, server: str, entry: TenantEntry) -> list[tuple[bool, str]]:
    """What would keep a server from being started and stopped: whether it is an error, and a sentence with the mend."""
    control = control_of(server, entry, config)
    if not isinstance(control, _Examined):
        return []
    try:
        found = [(True, f"tenants.{server}: {text}") for text in await control.problems()]
        if isinstance(control, DockerControl) and control.always_back and entry.evict != "never":
            text = "its restart policy is always, so it comes back by itself when the engine begins anew"
            mend = "swapper stops it again, and restart: unless-stopped spares that"
            found.append((False, f"tenants.{server}: {text}: {mend}"))
        return found
    finally:
        await control.close()
