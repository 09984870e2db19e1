"""The gateway of one process, made from the configuration: its names, its targets, its limits, and it has joined.

Invariant: of a serve that was killed the dead gateway leaves the store before the new one joins.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import cast

from swapper.api.ids import new_id
from swapper.backends import api_key
from swapper.config import Config
from swapper.config.served import LLAMA, ONE_MODEL, WHOLE
from swapper.core.eta import there_in_ms
from swapper.core.explain import explain_demand
from swapper.core.spec import Spec
from swapper.core.types import Swap
from swapper.gateway.admission import Admission
from swapper.gateway.context import GatewayContext, Limits, Target, Why
from swapper.gateway.filters import Filter, filter_of
from swapper.gateway.member import Member
from swapper.gateway.noted import Noted
from swapper.gateway.resume import resume, stands
from swapper.gateway.session import open_session
from swapper.gateway.written import Written
from swapper.listing import models_of
from swapper.snapshots.bodies import Bodies
from swapper.snapshots.index import Index
from swapper.snapshots.notes import Notes
from swapper.statefolder import StateFolder
from swapper.store.redis import RedisStore

RECORD = 200
"""So many of the last swaps are looked through for what came back with a model that still serves."""


async def _join(folder: StateFolder, store: RedisStore) -> str:
    """An id for our gateway. The folder's last one is dead: its membership ends now, and no swap waits for its answers.

    What it had sent to a server may still run there until the server notices the closed connection; the servers' own
    counters, asked before anything is saved or unloaded, cover that, as they do when a membership runs out.
    The order matters: killed between any two of these steps, the next process finds whoever is still a member.
    """
    dead, ours = folder.last_gateway(), new_id("g")
    if dead is not None:
        await store.leave(dead)
    folder.record_gateway(ours)
    return ours


async def why(store: RedisStore, spec: Callable[[], Spec], tenant: str) -> Why:
    """See `GatewayContext.why`."""
    world = await store.read()
    return Why(explain_demand(world, spec(), tenant), there_in_ms(world, spec(), tenant))


async def front_of(config: Config, folder: StateFolder, store: RedisStore, stack: AsyncExitStack) -> GatewayContext:
    """Joined, with what still lies in the servers' slots; `stack` closes it. Raises StoreDown."""
    concurrency = {t: limit for t in config.spec().tenants if (limit := config.model(t).concurrency) is not None}
    admission = Admission(
        await _join(folder, store),
        clock=lambda: time.monotonic_ns() // 1_000_000,
        max_waiting=config.policy.max_queue,
        concurrency=concurrency,
    )
    swaps, world = await store.swaps(limit=RECORD), await store.read()
    session = open_session()
    stack.push_async_callback(session.close)
    member = await _member(config, store, admission, swaps)
    stack.push_async_callback(member.close)  # while the servers can still be asked what the last answers left
    limits = Limits(
        max_wait_ms=config.gateway.max_wait_ms,
        keepalive_ms=config.gateway.keepalive_ms,
        keepalive_comments=config.gateway.keepalive_style == "comment",
        body_limit=config.gateway.body_limit_bytes,
        body_budget=config.gateway.body_budget_bytes,
    )
    context = GatewayContext(
        names=config.models(),
        targets={t: target_of(config, t) for t in config.models().values()},
        models=await asyncio.to_thread(models_of, config, os.environ),
        filters=filters_of(config),
        limits=limits,
        admission=admission,
        member=member,
        session=session,
    )
    stack.callback(context.links.close)
    displaced = tuple(talk for card in world.cards.values() for talk in card.displaced)
    for tenant in (t for t in config.spec().tenants if admission.gate(t).open):
        resume(member.talks, tenant, swaps, world.gateways, displaced)
    return context


async def _member(config: Config, store: RedisStore, admission: Admission, swaps: Sequence[Swap]) -> Member:
    """Joined, with the requests that earlier processes kept on disk, and where they noted conversations to be."""
    keeps = {t.id: config.tenants[t.server].snapshots for t in config.spec().tenants.values()}
    private = frozenset(t for t, keep in keeps.items() if keep.privacy == "strict")
    on_disk = frozenset(t for t, keep in keeps.items() if keep.bodies == "disk") - private
    index = Index(followed=bool(on_disk))
    member = Member(store, admission, alone=True, private=private, index=index)
    written = Written(Bodies(config.state_dir / "requests", index.limits.bytes), index, on_disk)
    noted = Noted(Notes(config.state_dir / "conversations"), index)
    await written.load()
    await noted.load([*config.spec().tenants], partial(stands, swaps))
    member.talks.keep_in(written if on_disk else None, noted)
    await member.start()
    return member


def target_of(config: Config, tenant: str) -> Target:
    """Where calls of a tenant go, and what its server calls its models."""
    server, one = config.served()[tenant]
    entry = config.tenants[server]
    others = {name: model for model, aliases in one.models[1:] for name in (model, *aliases)}
    kind = {
        "router": entry.kind == "llama-router",
        "slots": entry.kind in LLAMA,
        "several": entry.kind not in ONE_MODEL | WHOLE,
    }
    return Target(tenant, cast("str", entry.url), one.name, api_key(entry, one), others=others, **kind)


def filters_of(config: Config) -> Mapping[str, Filter]:
    """What is changed in the bodies of calls, by each name that is called; the server's own name means its first."""
    found: dict[str, Filter] = {}
    for tenant, (_, one) in config.served().items():
        entries = config.entries(tenant)
        owners = {name: entry for model, entry in entries.items() for name in (model, *entry.other_names)}
        for name in one.names:
            own = owners.get(name, next(iter(entries.values()))).filters
            made = filter_of(own.strip, own.set, own.by_name.get(name, {}))
            if made is not None:
                found[name] = made
    return found
