"""The snapshots of one server for whoever looks at them, deletes some, or wants old ones gone now.

Invariant: nothing is loaded or woken, and only what has a manifest is touched. Implements `swapper.snapshots.shelf`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from swapper.snapshots.manifest import Fingerprint, Manifest
from swapper.snapshots.shelf import Gone, Judged
from workers.llama.keeping import Keeper


class FolderShelf:
    """`now` gives the fingerprint that a tenant runs with, None where it does not run or that cannot be learnt."""

    def __init__(self, keeper: Keeper, now: Callable[[str], Awaitable[Fingerprint | None]]) -> None:
        self._keeper = keeper
        self._now = now

    @property
    def folder(self) -> Path:
        """The slot folder as this host sees it."""
        return self._keeper.folder.path

    async def manifests(self) -> Sequence[Manifest]:
        """All of the folder, the last used first."""
        with self._keeper.disk():
            return await asyncio.to_thread(self._keeper.folder.manifests)

    async def judged(self, manifests: Sequence[Manifest]) -> Sequence[Judged]:
        """By size, by what is known of the digest, and by fingerprint where the model runs; no file is read for it."""
        tenants = sorted({manifest.tenant for manifest in manifests})
        running = dict(zip(tenants, await asyncio.gather(*map(self._now, tenants)), strict=True))
        with self._keeper.disk():
            return await asyncio.to_thread(lambda: [self._judge(m, running[m.tenant]) for m in manifests])

    def _judge(self, manifest: Manifest, now: Fingerprint | None) -> Judged:
        why = self._keeper.folder.problem(manifest, now or manifest.fingerprint)
        return Judged(manifest, why, compared=now is not None)

    async def remove(self, names: Collection[str]) -> None:
        """Delete these, with what belongs to them."""
        await self._keeper.remove(names)

    async def prune(self) -> Sequence[Gone]:
        """Apply age and budget now."""
        before = {manifest.snapshot: manifest for manifest in await self.manifests()}
        gone = await self._keeper.prune()
        return [Gone(before[one.snapshot], one.why) for one in gone if one.snapshot in before]
