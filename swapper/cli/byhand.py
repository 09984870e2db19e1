"""`swapper load|unload|vacate|pin|unpin`: by hand, each waited for until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from swapper.cli import FAILED, OUT_OF_TIME
from swapper.cli.common import Duration, Json, Server, print_json, server_options
from swapper.cli.telling import moves, talks, took
from swapper.errors import ApiDown

if TYPE_CHECKING:
    from swapper.client import SwapperClient

_LOOK_S = 1.0
"""What is done within this needs no word of how far it is."""

_Asks = Callable[["SwapperClient"], Awaitable[Json]]
_wait = click.option(
    "--wait", type=Duration(),
    help="Wait this long at most, 0 for not at all; without it until it is done. Exit status 75 when it was not done "
    "by then (it goes on), 1 when it ended otherwise than asked for.",
)  # fmt: skip


@click.command(epilog="Example: swapper load qwen3-32b")
@click.argument("model")
@_wait
@server_options
def load(server: Server, as_json: bool, model: str, wait: float | None) -> None:
    """Load a model, sending away whom a call of it would; its saved conversations come back with it."""
    _do(server, lambda client: client.load(model), wait, as_json=as_json)


@click.command(epilog="Example: swapper unload qwen3-32b --drain 30s")
@click.argument("model")
@click.option("--drain", type=Duration(), help="Calls that run may take so long; without it as policy.drain says.")
@_wait
@server_options
def unload(server: Server, as_json: bool, model: str, drain: float | None, wait: float | None) -> None:
    """Unload a model, its conversations saved; it comes back when it is asked for, not before."""
    _do(server, lambda client: client.unload(model, drain_s=drain), wait, as_json=as_json)


@click.command(epilog="Example: swapper vacate gpu0 --force")
@click.argument("card")
@click.option("--force", is_flag=True, help="End calls at once, revoke the card's leases, and leave a fault.")
@_wait
@server_options
def vacate(server: Server, as_json: bool, card: str, force: bool, wait: float | None) -> None:
    """Unload all that is on a card; nobody comes back to it before it is asked for. Leases keep what they hold."""
    _do(server, lambda client: client.vacate(card, force=force), wait, as_json=as_json)


@click.command(epilog="Example: swapper pin qwen3-32b")
@click.argument("tenant")
@server_options
def pin(server: Server, as_json: bool, tenant: str) -> None:
    """Keep a tenant on its card: no call, load or lease sends it away, only your hand and maintenance do."""
    _do(server, lambda client: client.pin(tenant), None, as_json=as_json)


@click.command(epilog="Example: swapper unpin qwen3-32b")
@click.argument("tenant")
@server_options
def unpin(server: Server, as_json: bool, tenant: str) -> None:
    """Let a pinned tenant go again."""
    _do(server, lambda client: client.unpin(tenant), None, as_json=as_json)


def _do(server: Server, ask: _Asks, wait: float | None, *, as_json: bool) -> None:
    async def asked(client: SwapperClient) -> Json:
        return await _ended(client, await ask(client), wait)

    found = server.call(asked)
    if as_json:
        print_json(found)
    elif found["outcome"] == "done":
        click.echo(_line(found))
    elif found["outcome"] is None and wait == 0:
        click.echo(f"{found['id']}: {found['explain']}")
    if found["outcome"] not in (None, "done"):
        click.echo(f"Error: {_why(found)}; `swapper swaps {found['id']}` shows its steps", err=True)
        raise SystemExit(FAILED)
    if found["outcome"] is None and wait != 0:
        click.echo(f"Error: {found['id']} is not done yet, and goes on: {found['explain']}", err=True)
        raise SystemExit(OUT_OF_TIME)


async def _ended(client: SwapperClient, found: Json, wait_s: float | None) -> Json:
    """The swap once it has ended, or as it is after `wait_s`; how far it is is told from a second on.

    While swapper is away it is asked again: what it was asked for is on record.
    """
    loop = asyncio.get_running_loop()
    deadline, told = None if wait_s is None else loop.time() + wait_s, ""
    while found["outcome"] is None and (deadline is None or loop.time() < deadline):
        left = _LOOK_S if deadline is None else min(_LOOK_S, max(deadline - loop.time(), 0.0))
        try:
            found = await client.swap(found["id"], wait_s=left)
            said = str(found["explain"])
        except ApiDown as down:
            said = f"{down}; {found['id']} is on record, and looked for again"
            await asyncio.sleep(left)
        if found["outcome"] is None and said != told:
            click.echo(said, err=True)
        told = said
    return found


def _line(swap: Json) -> str:
    """What was done, in one line; where nothing moved, why."""
    moved = moves(swap)
    if moved == "-":
        return str(swap["reason"] or f"{swap['card']} is proved free")
    carried = f"; conversations: {said}" if (said := talks(swap["conversations"])) else ""
    return f"{swap['card']}: {moved} in {took(swap['overhead_ms'])}{carried}"


def _why(swap: Json) -> str:
    """Why it ended otherwise than asked for."""
    failed = [step["detail"] for step in swap["steps"] if step["outcome"] == "failed" and step["detail"]]
    reason = str(swap["reason"] or "it was turned back")
    more = [detail for detail in failed[:1] if detail not in reason]
    return ": ".join([reason, *more])
