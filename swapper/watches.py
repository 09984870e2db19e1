"""What waits and watches beside the parts of a process: whether one ended, and what is to be told of its state folder.

Invariant: a part that ends by itself is said once, in `failed`, and nothing here ends with it unseen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack

import structlog

from swapper.core.commit import Alert, AlertKind, Commit
from swapper.core.spec import Spec
from swapper.errors import StoreDown, SwapperError
from swapper.gateway.member import Member
from swapper.statefolder import StateFolder
from swapper.store.redis import RedisStore
from workers.backend import Backend
from workers.watch import start_of

log = structlog.get_logger(__name__)

ALERT_RETRY_S = 1.0
LOOK_S = 2.0
"""So often the state folder is looked at though nobody asks."""


async def background(
    stack: AsyncExitStack, failed: asyncio.Future[str], work: Coroutine[None, None, None], name: str
) -> None:
    """Run a part until the stack unwinds; if it ends before, `failed` says so."""
    task = asyncio.create_task(work, name=name)

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        log.error("a part of swapper ended; stopping", part=name, exc_info=error)
        if not failed.done():
            why = str(error) if isinstance(error, SwapperError) else repr(error)
            failed.set_result(f"the {name} ended by itself: {why}")

    async def cancel() -> None:
        task.remove_done_callback(ended)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    task.add_done_callback(ended)
    stack.push_async_callback(cancel)


async def started(backends: Mapping[str, Backend]) -> None:
    """Start the servers that are ours to start. One that does not is left to the agent, which tries again and tells it.

    It may be misconfigured, or its engine, manager or API away now (after a boot they come in any order): its own
    tenants are the only ones that this concerns.
    """

    async def start(server: str, backend: Backend) -> None:
        if (trouble := await start_of(server, backend)) is not None:
            log.warning("the server does not start yet", server=server, error=trouble)

    await asyncio.gather(*(start(server, backend) for server, backend in backends.items()))


async def until_ended(member: Member) -> None:
    """Raises SwapperError once the gateway's loops are out of service."""
    await member.ended.wait()
    raise SwapperError(member.problem or "its loops ended")


async def or_failed(event: asyncio.Event, failed: asyncio.Future[str]) -> None:
    """Wait for the event. Raises SwapperError when a part ends before."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting, failed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if failed.done():
        raise SwapperError(failed.result())


async def watch_folder(folder: StateFolder, store: RedisStore, spec: Spec) -> None:
    """Say once what happened, in the log and as an alert of every card; the status says it for as long as it is so."""
    told: str | None = None
    while True:
        problem = folder.look()
        if problem is not None and problem != told:
            log.error("the state folder is not as it was", problem=problem)
            alerts = tuple(Alert(card, problem, kind=AlertKind.STATE_DIR) for card in spec.cards)
            await _alert(store, Commit(alerts=alerts))
            told = problem
        await asyncio.sleep(LOOK_S)


async def warn(store: RedisStore, alerts: tuple[Alert, ...]) -> None:
    """Say these, in the log and in the store; waits while that is down."""
    for alert in alerts:
        log.warning("alert", card=alert.card, text=alert.text)
    if alerts:
        await _alert(store, Commit(alerts=alerts))


async def _alert(store: RedisStore, alerts: Commit) -> None:
    while True:
        try:
            await store.commit(alerts)
            return
        except StoreDown:  # the socket is gone as well: until a call finds an open connection
            await asyncio.sleep(ALERT_RETRY_S)
