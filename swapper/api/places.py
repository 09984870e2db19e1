"""Where the conversations of each model are: in its server, on disk, or nowhere.

Invariant: of a model on its card the gateway's index says it; of one that is away its manifests do, read anew, for an
index hears what became of a conversation only once its model is back. Nothing is changed by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from swapper.api.context import ApiContext
from swapper.core.types import World
from swapper.errors import BackendError
from swapper.snapshots.conversation import Place
from swapper.snapshots.copies import away
from swapper.snapshots.manifest import Manifest

Places = Mapping[Place, int]


async def places(ctx: ApiContext, world: World, tenants: Iterable[str] | None = None) -> Mapping[str, Places]:
    """Tenant -> how many conversations are where; of all tenants, unless some are named.

    A folder that cannot be read has nothing that could come back from it.
    """
    there = {resident for card in world.cards.values() for resident in card.residents}
    asked = ctx.spec.tenants if tenants is None else tenants
    gone = {tenant for tenant in asked if tenant not in there and ctx.spec.tenants[tenant].serves_models}
    saved = await _saved(ctx, gone)
    return {t: _away(ctx, t, saved[t]) if t in gone else ctx.index.places(t) for t in asked}


def _away(ctx: ApiContext, tenant: str, manifests: Collection[Manifest]) -> Places:
    on_disk, lost = away(ctx.index.conversations(tenant), manifests)
    return {Place.SERVER: 0, Place.DISK: on_disk, Place.COLD: lost}


async def _saved(ctx: ApiContext, tenants: Collection[str]) -> Mapping[str, Collection[Manifest]]:
    """What lies in the folder of each one's server."""
    found: dict[str, list[Manifest]] = {tenant: [] for tenant in tenants}
    for server in {ctx.spec.tenants[tenant].server for tenant in tenants} & {*ctx.shelves}:
        try:
            manifests = await ctx.shelves[server].manifests()
        except BackendError:
            continue
        for manifest in manifests:
            if manifest.tenant in found and ctx.spec.tenants[manifest.tenant].server == server:
                found[manifest.tenant].append(manifest)
    return found
