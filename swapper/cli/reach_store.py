"""`swapper check` on a store of one's own: what a power cut, a kill or a full memory would take from it.

Invariant: asks for settings alone and changes nothing. What a server does not tell (a managed one often refuses CONFIG)
is taken from what it says of its state, and else not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import redis.asyncio
from redis.exceptions import RedisError

from swapper.store.redis import without_secret

_ASKED = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
_TIMEOUT_S = 5.0


async def reach_store(url: str) -> list[str]:
    """What to know of the store at `url`, a sentence each; nothing where it does not answer."""
    client = redis.asyncio.from_url(url, decode_responses=True, socket_timeout=_TIMEOUT_S)  # pyright: ignore[reportUnknownMemberType]
    try:
        settings = await _settings(client)
    except (RedisError, OSError):
        return []
    finally:
        await client.aclose()
    return [f"redis: {without_secret(url)} {said}" for said in judged(settings)]


async def _settings(client: redis.asyncio.Redis) -> Mapping[str, str]:
    try:
        return cast("Mapping[str, str]", await client.config_get(*_ASKED))  # pyright: ignore[reportUnknownMemberType]
    except RedisError:
        state = cast("Mapping[str, object]", await client.info())  # pyright: ignore[reportUnknownMemberType]
        names = {"maxmemory": "maxmemory", "maxmemory-policy": "maxmemory_policy"}
        told = {name: str(state[there]) for name, there in names.items() if there in state}
        written = state.get("aof_enabled")
        return told if written is None else told | {"appendonly": "yes" if written else "no"}


def judged(settings: Mapping[str, str]) -> list[str]:
    """What follows from a server's settings, as far as it told them."""
    found: list[str] = []
    if settings.get("appendonly") == "no":
        said = "writes no log (appendonly no): after a kill or a power cut leases that somebody holds are forgotten"
        found.append(f"{said}; set appendonly yes and appendfsync always")
    elif settings.get("appendfsync", "always") != "always":
        said = f"writes to the disk later than it answers (appendfsync {settings['appendfsync']})"
        found.append(f"{said}: a power cut takes back what it acknowledged last; set appendfsync always")
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and settings.get("maxmemory", "0") != "0":
        said = f"throws away what it holds once its memory is full (maxmemory-policy {policy})"
        found.append(f"{said}, leases too; set maxmemory-policy noeviction")
    return found
