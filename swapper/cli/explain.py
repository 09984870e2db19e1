"""`swapper explain ID`: why a lease waits, or how it ended, in one sentence."""

from __future__ import annotations

import click

from swapper.cli.common import Server, print_json, server_options


@click.command(epilog="Example: swapper explain ls_01J...")
@click.argument("lease_id", metavar="ID")
@server_options
def explain(server: Server, as_json: bool, lease_id: str) -> None:
    """Why a lease waits, or how it ended, in one sentence."""
    found = server.call(lambda client: client.lease(lease_id))
    if as_json:
        return print_json({name: found[name] for name in ("id", "state", "position", "eta_s", "explain")})
    return click.echo(found["explain"])
