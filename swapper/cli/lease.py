"""`swapper lease ...`: the lease API by hand."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from swapper.cli import FAILED, OUT_OF_TIME
from swapper.cli.common import Duration, Json, Server, console, lease_line, out_of_time, print_json, server_options

if TYPE_CHECKING:
    from swapper.client import SwapperClient

_CLASSES = ("interactive", "normal", "batch", "maintenance")
_STATES = ("queued", "preparing", "granted", "released", "expired", "revoked", "cancelled", "failed")


@click.group(epilog="Example: swapper lease request --card gpu0 --label encode --wait 10m")
def lease() -> None:
    """Request, look at, keep and give back leases."""


@lease.command(epilog="Example: swapper lease request --card gpu0 --vram 12GiB --label encode --wait 10m")
@click.option("--card", help="Which card; without it any, whichever is free first.")
@click.option("--vram", default="all", help="How much of it: all, or a size such as 12GiB.", show_default=True)
@click.option("--label", default="", help="What it is for, shown to everybody who waits.")
@click.option("--class", "klass", type=click.Choice(_CLASSES), help="How urgent it is; normal where the key may.")
@click.option(
    "--ttl", type=Duration(), default="30s", help="Lost after this long without a heartbeat.", show_default=True
)
@click.option("--max-hold", type=Duration(), help="Longest it may be held; without it policy.max_hold, 1h.")
@click.option("--expected", type=Duration(), help="How long it will probably be held; recorded, not used yet.")
@click.option("--not-before", help="Do not grant before this time, as 2026-03-01T04:00:00Z.")
@click.option("--deadline", help="Give up when not granted by this time, written likewise.")
@click.option("--preemptible", is_flag=True, help="Recorded; this version does not revoke for it.")
@click.option("--holder-pid", type=int, help="The process on the GPU host; the card is free when it is gone.")
@click.option("--idempotency-key", help="The same key gives the same lease.")
@click.option(
    "--wait",
    type=Duration(),
    help="Wait this long for the grant; exit status 75 when it did not come (the request stays queued: `swapper lease "
    "cancel ID` withdraws it), 1 when the lease failed.",
)
@server_options
def request(server: Server, as_json: bool, wait: float | None, idempotency_key: str | None, **options: Any) -> None:  # noqa: ANN401
    """Ask for a card, or for part of one. Exit status 1 when the lease failed, with its reason."""
    body = _body(options)

    async def ask(client: SwapperClient) -> Json:
        asked = await client.request_lease(body, idempotency_key=idempotency_key)
        return asked if wait is None else await client.wait(asked["id"], limit_s=wait)

    found = server.call(ask)
    _show(found, as_json=as_json)
    if wait is not None and found["state"] != "granted":
        if not out_of_time(found):
            click.echo(f"Error: the lease is {found['explain']}", err=True)
        raise SystemExit(OUT_OF_TIME if out_of_time(found) else FAILED)


def _body(options: dict[str, Any]) -> Json:
    names = {"klass": "class", "ttl": "ttl_s", "max_hold": "max_hold_s", "expected": "expected_s"}
    given = {names.get(name, name): value for name, value in options.items()}
    return {name: value for name, value in given.items() if value is not None}


@lease.command("list", epilog="Example: swapper lease list --state queued")
@click.option("--state", type=click.Choice(_STATES), help="Only those in this state.")
@click.option("--card", help="Only those of this card.")
@click.option("--owner", help="Only those of the key with this name.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="So many at most.")
@server_options
def list_(server: Server, as_json: bool, **query: Any) -> None:  # noqa: ANN401
    """Leases, the newest first."""
    page = server.call(lambda client: client.leases(**query))
    if as_json:
        return print_json(page)
    if not page["items"]:
        return click.echo("no leases")
    from rich.table import Table

    table = Table("id", "state", "card", "class", "owner", "label", "why", box=None)
    for item in page["items"]:
        cells = (item["id"], item["state"], item["card"] or "any", item["class"], item["owner"], item["label"])
        table.add_row(*cells, item["explain"] or "")
    console().print(table)


@lease.command(epilog="Example: swapper lease show ls_01J... --wait 30s")
@click.argument("lease_id", metavar="ID")
@click.option("--wait", type=Duration(), help="First wait this long until it is granted or has ended.")
@server_options
def show(server: Server, as_json: bool, lease_id: str, wait: float | None) -> None:
    """One lease: its state and why it is in it, and once granted its token."""
    limit = 0.0 if wait is None else wait
    _show(server.call(lambda client: client.wait(lease_id, limit_s=limit)), as_json=as_json)


@lease.command(epilog="Example: swapper lease heartbeat ls_01J... --token 1883206385664001 --progress 0.4")
@click.argument("lease_id", metavar="ID")
@click.option("--token", type=int, envvar="SWAPPER_TOKEN", required=True, show_envvar=True, help="The lease's token.")
@click.option("--progress", type=click.FloatRange(0, 1), help="How far the work is, 0 to 1.")
@server_options
def heartbeat(server: Server, as_json: bool, lease_id: str, token: int, progress: float | None) -> None:
    """Keep a granted lease for another ttl."""
    found = server.call(lambda client: client.heartbeat(lease_id, token, progress=progress))
    if as_json:
        return print_json(found)
    asked = f"; asked to leave by {found['revoke_at']}" if found["revoke_at"] else ""
    return click.echo(f"{lease_id} lives until {found['expires_at']}{asked}")


@lease.command(epilog="Example: swapper lease release ls_01J...")
@click.argument("lease_id", metavar="ID")
@click.option("--token", type=int, help="The lease's token; looked up without it.")
@server_options
def release(server: Server, as_json: bool, lease_id: str, token: int | None) -> None:
    """Give a granted lease back."""

    async def give_back(client: SwapperClient) -> Json:
        mark = token or _own_token(lease_id) or (await client.lease(lease_id))["token"]
        return await client.release(lease_id, token=mark)

    _show(server.call(give_back), as_json=as_json)


@lease.command(epilog="Example: swapper lease cancel ls_01J...")
@click.argument("lease_id", metavar="ID")
@server_options
def cancel(server: Server, as_json: bool, lease_id: str) -> None:
    """Give up a lease that still waits; a granted one is left alone (release it)."""
    _show(server.call(lambda client: client.release(lease_id)), as_json=as_json)


def _own_token(lease_id: str) -> int | None:
    """The token of the lease this process runs under, when it is this one."""
    mine = os.environ.get("SWAPPER_LEASE") == lease_id
    text = os.environ.get("SWAPPER_TOKEN", "") if mine else ""
    return int(text) if text.isdecimal() else None


def _show(found: Json, *, as_json: bool) -> None:
    if as_json:
        return print_json(found)
    click.echo(lease_line(found))
    for name in ("explain", "token", "expires_at", "revoke_at", "swap_id"):
        if found[name] is not None and not (name in ("token", "expires_at") and found["state"] != "granted"):
            click.echo(f"  {name.removesuffix('_id').removesuffix('_at').replace('_', ' ')}: {found[name]}")
    return None
