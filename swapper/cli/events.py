"""`swapper events`: the event log, as it was and as it grows."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from typing import TYPE_CHECKING

import click

from swapper.cli.common import Server, server_options
from swapper.cli.telling import told

if TYPE_CHECKING:
    from swapper.client import Event, SwapperClient

_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


@click.command(epilog="Example: swapper events -f --since 1764460800000-0")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now.")
@click.option("--since", metavar="ID", help="Only what came after this event; 0 for all that is kept.")
@server_options
def events(server: Server, as_json: bool, follow: bool, since: str | None) -> None:
    """The event log: all that is kept, or with -f what happens from now on."""
    if since is not None and _ID.fullmatch(since) is None:
        like = "write one as this command prints it in front of each, like 1764460800000-0, or 0 for all that is kept"
        raise click.BadParameter(f"{since!r} is not the id of an event; {like}", param_hint="--since")

    def gap(asked: str, oldest: str) -> None:
        kept = f"the log goes back to {oldest} only"
        click.echo(f"warning: {kept}; what came between {asked} and that is not told", err=True)

    async def tell(client: SwapperClient) -> None:
        start = since if follow else since or "0"
        async for event in client.events(since=start, follow=follow, gap=gap):
            click.echo(_as_json(event) if as_json else _line(event))

    server.call(tell)


def _as_json(event: Event) -> str:
    return json.dumps({"id": event.id, "type": event.type, "data": event.data}, ensure_ascii=False)


def _line(event: Event) -> str:
    """Its id, when, what and who, in columns; colours go away where standard output is no terminal."""
    stamp = event.id.partition("-")[0]
    at = f"{datetime.fromtimestamp(int(stamp) / 1000):%m-%d %H:%M:%S}" if stamp.isdecimal() else stamp
    said = told(event.type, event.data)
    plain = bool(os.environ.get("NO_COLOR"))
    place = event.id if plain else click.style(event.id, dim=True)
    state = f"{said.state:<9}" if plain else click.style(f"{said.state:<9}", fg=said.colour)
    return f"{place}  {at}  {event.type:<12}  {said.who:<29}  {state}  {said.text}".rstrip()
