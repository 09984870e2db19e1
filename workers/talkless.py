"""The part of a backend whose tenant has no conversations: what is asked of them is answered in one sentence.

Invariant: nothing is asked of the tenant, and nothing changes.
"""

from __future__ import annotations

from swapper.errors import BackendRefused
from workers.backend import Restored, Room, SaveArgs, Saved, SaveUnsupported


class Talkless:
    """The verbs `save` and `restore` of `workers.backend.Backend`."""

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """Raises SaveUnsupported: it has no conversations."""
        del args
        raise SaveUnsupported(f"{tenant} has no conversations")

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        """Raises BackendRefused: it has no conversations."""
        del slot, room
        raise BackendRefused(f"{snapshot} cannot be restored: {tenant} has no conversations")
