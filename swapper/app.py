"""Wires everything: the one file that knows everybody. `running(config)` is a whole swapper in this process.

Invariant: whoever has the state folder's lock, and nobody else, starts and stops what is in it. Parts are started in
the order store, claim on the host, servers, gateway, coordinator, agent, HTTP, and stopped in the reverse order;
stopping leaves the residents and the servers we started as they are, only the embedded store is shut down. A part that
ends by itself is said in `Running.failed`; nothing goes on without it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

from aiohttp import web

from swapper import api
from swapper.api import ApiContext
from swapper.api.auth import model_caller
from swapper.api.ids import new_id
from swapper.api.listening import Runner
from swapper.api.problem import is_ours
from swapper.backends import backend_of
from swapper.comfyui.serving import open_gates
from swapper.config import Config
from swapper.config.advice import model_options
from swapper.controls import control_of
from swapper.coordinator import Coordinator
from swapper.core.spec import Spec
from swapper.core.troubles import line
from swapper.errors import ConfigError, StoreDown, SwapperError
from swapper.estimates import rams, thought
from swapper.foresee import before_start
from swapper.front import front_of, why
from swapper.gateway import http as gateway
from swapper.gateway import origins
from swapper.gateway.context import GatewayContext
from swapper.gateway.member import Member
from swapper.gateway.origins import origins_of
from swapper.gateway.wire import Door
from swapper.jobs.runner import Jobs
from swapper.notify.notifier import Notifier
from swapper.notify.post import send
from swapper.ourselves import Ourselves
from swapper.probes import Devices, held_by, look, probes_of, totals
from swapper.slotclaim import claimed
from swapper.snapshots.shelf import Shelved
from swapper.statefolder import StateFolder, writing
from swapper.store.kept import Kept
from swapper.store.redis import RedisStore
from swapper.watches import background, or_failed, started, until_ended, warn, watch_folder
from workers.agent import Agent
from workers.backend import Backend, Owners, Probe
from workers.control import Control, Watched
from workers.hostram import HostRam
from workers.jobs import still_running
from workers.marks import Marks
from workers.pagecache import PageCache, files_of

SHUTDOWN_S = 2.0
BACKLOG = 1024
"""So many connections may come at once: a tool with many workers opens them all in a moment."""


@dataclass(slots=True)
class Running:
    """A started swapper. `url` is where its API and gateway listen, `controls` what it started, by server name.

    `failed` is done once a part ended by itself, with a sentence that says which and why.
    """

    url: str
    store: RedisStore
    spec: Spec
    coordinator: Coordinator
    controls: Mapping[str, Control]
    config: Config
    failed: asyncio.Future[str]

    @asynccontextmanager
    async def unless_failed(self) -> AsyncGenerator[None]:
        """Leave the block at once, with SwapperError, when a part ends by itself. Only one task may run the block."""
        task = asyncio.current_task()
        assert task is not None
        cancels, told = task.cancelling(), False

        def end(_failed: asyncio.Future[str]) -> None:
            nonlocal told
            told = task.cancel()

        self.failed.add_done_callback(end)
        try:
            yield
        except asyncio.CancelledError:
            if told and task.uncancel() <= cancels:
                raise SwapperError(self.failed.result()) from None
            raise
        finally:
            self.failed.remove_done_callback(end)


class _Live:
    """What the API may know of this process beyond the store."""

    def __init__(self, coordinator: Coordinator, spec: Spec, member: Member, folder: StateFolder) -> None:
        self._coordinator = coordinator
        self._spec = spec
        self._member = member
        self._folder = folder

    def readings(self) -> Mapping[str, dict[str, object]]:
        return {card: dict(reading) for card, reading in self._coordinator.seen.readings.items()}

    def states(self) -> Mapping[str, str]:
        return dict(self._coordinator.seen.states)

    def why_not_started(self) -> Mapping[str, str]:
        return self._coordinator.seen.why_not_started()

    def problems(self) -> list[str]:
        hosts = {card.host for card in self._spec.cards.values()}
        silent = sorted(hosts - self._coordinator.seen.hosts)
        read = sorted(self.readings().items())
        troubles, served = self.why_not_started(), self._spec.tenants
        gone = sorted(t for t, state in self.states().items() if state in ("unreachable", "stopped"))
        silent_too = [t for t in gone if t not in served or served[t].server not in troubles]
        return [
            *(problem for problem in (self._member.problem, self._folder.look()) if problem),
            *(f"the agent of host {host} has not reported yet" for host in silent),
            *(line(server, why) for server, why in sorted(troubles.items())),
            *(f"the server of {tenant} does not answer" for tenant in silent_too),
            *(f"the VRAM of {card} cannot be read: {one['unread']}" for card, one in read if "unread" in one),
        ]


@asynccontextmanager
async def running(config: Config, *, host: str = "main") -> AsyncGenerator[Running]:
    """Everything of one host, started; on leaving the block everything is stopped again.

    Raises ConfigError (another serve on the state folder, on a router's slot folder or for this host in the store, a
    state folder that nobody may write, an address in use), StoreDown of a configured store, BackendError, SwapperError
    when our own store or the folder cannot be had (a full disk), or when a part ends while the others are started.
    """
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        folder = StateFolder(config.state_dir)
        stack.callback(folder.release)
        stack.enter_context(claimed(config))
        kept = Kept(folder.path) if config.redis is None else None
        store = await _store(config, folder, stack, failed, kept)
        probes = probes_of(config, config.spec(), host)
        needs = await asyncio.to_thread(thought, config, os.environ)
        spec = config.spec().estimated(needs).learned(totals(await look(probes)))
        controls = {name: control_of(name, entry, config) for name, entry in config.tenants.items()}
        backends = _backends(config, controls, probes, stack)
        agent = await _agent(config, host, store, spec, backends, probes, stack)
        await _notifier(config, agent.owner, store, stack, failed)
        await warn(store, tuple(await before_start(config, controls)))
        await started(backends)
        coordinator = Coordinator(store, spec, new_id)
        front = await front_of(config, folder, store, stack)
        await background(stack, failed, until_ended(front.member), "gateway")
        await background(stack, failed, watch_folder(folder, store, spec), "watch over the state folder")
        live = _Live(coordinator, spec, front.member, folder)
        await background(stack, failed, coordinator.run(), "coordinator")
        await or_failed(coordinator.listening, failed)
        await background(stack, failed, agent.run(), "agent")
        context = _api(config, store, live, front, backends)
        _told_of_each_other(coordinator, context, front, store)
        context.whose = _ourselves(config, kept, controls).whose
        url = await _serve(config, context, front, stack)
        context.jobs = jobs = _jobs(config, context, agent, host, url)
        await background(stack, failed, jobs.run(), "jobs")
        await background(stack, failed, context.count(), "metrics")
        await open_gates(config, context, front, stack, failed)
        yield Running(url, store, spec, coordinator, controls, config, failed)


def _told_of_each_other(
    coordinator: Coordinator, context: ApiContext, front: GatewayContext, store: RedisStore
) -> None:
    """What the coordinator learns is known to the API and the gateway, and what the store takes is timed."""
    front.contexts, front.inputs = coordinator.seen.contexts, coordinator.seen.inputs
    context.spec = coordinator.spec
    coordinator.on_learned = partial(setattr, context, "spec")
    front.why = partial(why, store, lambda: context.spec)
    store.took = context.meter.stored


async def _store(
    config: Config, folder: StateFolder, stack: AsyncExitStack, failed: asyncio.Future[str], kept: Kept | None
) -> RedisStore:
    """`kept` is ours to start; None where the configuration names one."""
    url = config.redis or ""
    if kept is not None:
        try:
            url = (await kept.start()).url
        except StoreDown as down:
            raise SwapperError(str(down)) from down  # ours to start: nobody else's to reach, and no try later helps
        stack.push_async_callback(kept.stop)
        folder.watch(kept.lost)
        await background(stack, failed, kept.keep(), "embedded store")
    store = await RedisStore.open(url)
    stack.push_async_callback(store.close)
    return store


def _backends(
    config: Config, controls: Mapping[str, Control], probes: Mapping[str, Probe], stack: AsyncExitStack
) -> Mapping[str, Backend]:
    async def held(tenant: str, owners: Owners) -> int | None:
        probe = probes.get(config.tenants[tenant].card)
        return None if probe is None else await held_by(probe, tenant, owners)

    found = {name: backend_of(name, entry, config, controls[name], held) for name, entry in config.tenants.items()}
    for control in controls.values():
        if isinstance(control, Watched):
            stack.push_async_callback(control.close)
    for backend in found.values():
        stack.push_async_callback(backend.close)
    return found


async def _agent(
    config: Config,
    host: str,
    store: RedisStore,
    spec: Spec,
    backends: Mapping[str, Backend],
    probes: Mapping[str, Probe],
    stack: AsyncExitStack,
) -> Agent:
    """The host is ours from here on."""
    with writing(config.state_dir):
        marks = Marks.open(config.state_dir / "marks" / f"{host}.jsonl")
    stack.callback(marks.close)
    floor_mib = config.policy.ram_floor_mib
    page_cache = PageCache(partial(files_of, backends), floor_mib=floor_mib)
    ram = HostRam(await asyncio.to_thread(rams, config, os.environ), floor_mib=floor_mib)
    stack.push_async_callback(page_cache.close)
    runs = partial(still_running, config.state_dir / "jobs")
    agent = Agent(host, store, backends, spec.tenants, probes, marks, page_cache, ram, runs)
    stack.push_async_callback(agent.close)
    await agent.claim()
    return agent


async def _notifier(
    config: Config, owner: str, store: RedisStore, stack: AsyncExitStack, failed: asyncio.Future[str]
) -> None:
    """Started before anything is logged that is to be told."""
    if not config.recipients:
        return
    notifier = Notifier(store, config.recipients, owner, send)
    await notifier.begin()
    stack.push_async_callback(notifier.close)
    await background(stack, failed, notifier.run(), "notifier")


def _api(
    config: Config, store: RedisStore, live: _Live, front: GatewayContext, backends: Mapping[str, Backend]
) -> ApiContext:
    owners = {name: one for name, one in backends.items() if isinstance(one, Shelved)}
    options = {tenant: model_options(config, tenant, os.environ) for tenant in config.spec().tenants}
    return ApiContext(
        store=store,
        spec=config.spec(),
        keys=config.keys,
        live=live,
        env=Devices(config.cards, live.readings),
        names=config.models(),
        shelves={name: shelf for name, one in owners.items() if (shelf := one.shelf()) is not None},
        index=front.talks.index,
        drop_requests=front.talks.drop_requests,
        n_slots={tenant: found.n_parallel for tenant, found in options.items() if found is not None},
    )


def _jobs(config: Config, context: ApiContext, agent: Agent, host: str, url: str) -> Jobs:
    return Jobs(
        context.store,
        context.tail,
        config.recipes(),
        config.state_dir / "jobs",
        host=host,
        max_queue=config.policy.max_queue,
        new_id=new_id,
        now_ms=lambda: time.time_ns() // 1_000_000,
        fence=agent.sure,
        env=context.env,
        url=url,
    )


def _ourselves(config: Config, kept: Kept | None, controls: Mapping[str, Control]) -> Ourselves:
    return Ourselves(
        store=kept.pid if kept is not None else lambda: None,
        servers={name: control.pid for name, control in controls.items()},
        urls={name: entry.url for name, entry in config.tenants.items() if entry.url is not None},
    )


async def _serve(config: Config, context: ApiContext, front: GatewayContext, stack: AsyncExitStack) -> str:
    front.told = context.meter.answered
    pages = origins_of(config.gateway.cors, keyed=bool(config.keys))
    app = web.Application(middlewares=[origins.middleware(pages, is_ours), *api.middlewares(context)])
    app.on_response_prepare.append(origins.signal(pages, is_ours))
    app.on_shutdown.append(lambda _: front.sockets.stop())
    app.add_routes([*api.routes(context), *gateway.routes(front)])
    runner = Runner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, **gateway.SERVER_OPTIONS)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    stack.push_async_callback(context.close)
    host, port = config.listen
    server = runner.server
    assert server is not None
    door = Door(front, server, model_caller(config.keys))
    try:
        listening = await asyncio.get_running_loop().create_server(
            door, host, port, reuse_address=True, backlog=BACKLOG
        )
    except OSError as error:
        raise ConfigError(
            [f"listen: {host}:{port} cannot be used: {error.strerror}; is another server there?"]
        ) from None
    stack.push_async_callback(door.close, SHUTDOWN_S)
    stack.callback(listening.close)
    bound = cast("tuple[str, int]", listening.sockets[0].getsockname())
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{bound[1]}"
