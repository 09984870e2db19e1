"""`swapper events`: the event log, as it was and as it grows."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

import click

from swapper.cli.common import Server, server_options

if TYPE_CHECKING:
    from swapper.client import Event, SwapperClient


@click.command(epilog="Example: swapper events -f --since 1764460800000-0")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now.")
@click.option("--since", metavar="ID", help="Only what came after this event; 0 for all that is kept.")
@server_options
def events(server: Server, as_json: bool, follow: bool, since: str | None) -> None:
    """The event log: all that is kept, or with -f what happens from now on."""

    async def tell(client: SwapperClient) -> None:
        start = since if follow else since or "0"
        async for event in client.events(since=start, follow=follow):
            click.echo(_as_json(event) if as_json else _line(event))

    server.call(tell)


def _as_json(event: Event) -> str:
    return json.dumps({"id": event.id, "type": event.type, "data": event.data}, ensure_ascii=False)


def _line(event: Event) -> str:
    stamp = event.id.partition("-")[0]
    at = f"{datetime.fromtimestamp(int(stamp) / 1000):%H:%M:%S.%f}"[:-3] if stamp.isdecimal() else stamp
    data = event.data
    said = data.get("reason") or data.get("explain") or data.get("text") or data.get("cause") or ""
    state = data.get("state") or ""
    return f"{event.id}  {at}  {event.type:<12} {data.get('id', '')} {state}  {said}".rstrip()
