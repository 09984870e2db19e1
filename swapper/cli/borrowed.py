"""A card borrowed for a while by a command that works on it itself.

Invariant: while the block runs the lease is kept by heartbeats, and it is given back however the block ends. A lease
that this process runs under already (SWAPPER_LEASE, as in a window) is used as it is, and kept and ended by its owner.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast
from uuid import uuid4

from swapper.cli.common import Json
from swapper.client import SwapperClient
from swapper.errors import ApiDown, ApiError, ApiRefused, SwapperError

_LOST = (404, 409, 410)
_POLL_S = 20.0
TTL_S, BEATS = 30, 3
"""Seconds, and how many heartbeats fall into them."""
_RELEASES_S = (0.5, 1.0, 2.0, 5.0)


class OutOfTime(SwapperError):
    """The lease was not granted within the time that was given."""


@asynccontextmanager
async def borrowed(
    client: SwapperClient, card: str, label: str, *, wait_s: float | None, say: Callable[[str], None]
) -> AsyncGenerator[None]:
    """The whole of the card for the block, which is cancelled when the lease is lost.

    Raises OutOfTime, SwapperError when the lease is not to be had or was lost, ApiError.
    """
    if "SWAPPER_LEASE" in os.environ:
        _fits(await client.lease(os.environ["SWAPPER_LEASE"]), card)
        yield
        return
    body = {"card": card, "label": label, "ttl_s": TTL_S}
    lease = await client.request_lease(body, idempotency_key=str(uuid4()))
    try:
        lease = await _granted(client, lease, wait_s, say)
        async with _kept(client, lease):
            yield
    finally:
        await asyncio.shield(_give_back(client, lease["id"], say))


def _fits(lease: Json, card: str) -> None:
    """Raises SwapperError where the lease we run under does not cover the card."""
    if lease["state"] != "granted" or lease["card"] != card or lease["vram_mib"] is not None:
        have = f"{lease['id']}, under which this runs, is {lease['state']} on {lease['card']}"
        raise SwapperError(f"{have}; the whole of {card} is needed")


async def _granted(client: SwapperClient, lease: Json, wait_s: float | None, say: Callable[[str], None]) -> Json:
    loop = asyncio.get_running_loop()
    deadline = None if wait_s is None else loop.time() + wait_s
    said: object = None
    while lease["state"] in ("queued", "preparing"):
        left = _POLL_S if deadline is None else min(_POLL_S, deadline - loop.time())
        if left <= 0:
            raise OutOfTime(f"the wait ran out: {lease['explain']}")
        if lease["explain"] != said:
            said = lease["explain"]
            say(str(said))
        with suppress(ApiDown):
            lease = await client.wait(lease["id"], limit_s=left)
    if lease["state"] != "granted":
        raise SwapperError(f"the lease is {lease['explain']}")
    return lease


@asynccontextmanager
async def _kept(client: SwapperClient, lease: Json) -> AsyncGenerator[None]:
    task = cast("asyncio.Task[None]", asyncio.current_task())
    lost: list[str] = []

    async def beat() -> None:
        while True:
            await asyncio.sleep(TTL_S / BEATS)
            try:
                alive = await client.heartbeat(lease["id"], lease["token"])
            except ApiRefused as error:
                if error.status in _LOST:
                    lost.append(str(error))
                    break
            except ApiError:
                continue  # it comes back before the ttl, or the lease is told lost then
            else:
                if alive["revoke_at"] is not None:
                    lost.append(f"asked to leave by {alive['revoke_at']}")
                    break
        task.cancel()

    cancels = task.cancelling()
    beating = asyncio.create_task(beat(), name="heartbeats")
    try:
        yield
    except asyncio.CancelledError:
        if lost and task.uncancel() <= cancels:
            raise SwapperError(f"the lease was lost: {lost[0]}") from None
        raise
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _give_back(client: SwapperClient, lease_id: str, say: Callable[[str], None]) -> None:
    """Tried for a while, then left to its ttl."""
    for pause_s in (*_RELEASES_S, None):
        try:
            token = (await client.lease(lease_id))["token"]
            await client.release(lease_id, token=token)
            return
        except ApiRefused:
            return  # it has ended by itself
        except ApiDown as error:
            if pause_s is None:
                say(f"the lease {lease_id} was not given back and will expire: {error}")
            else:
                await asyncio.sleep(pause_s)
