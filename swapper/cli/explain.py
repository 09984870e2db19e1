"""`swapper explain ID`: why a lease waits or how it ended, what a swap does or did, in one sentence."""

from __future__ import annotations

import click

from swapper.cli.common import Json, Server, print_json, server_options
from swapper.cli.swaps import swap_line

_LEASE, _SWAP = "ls_", "sw_"


@click.command(epilog="Example: swapper explain ls_01J...")
@click.argument("what", metavar="ID")
@server_options
def explain(server: Server, as_json: bool, what: str) -> None:
    """Why a lease (ls_...) waits or how it ended, what a swap (sw_...) does or did, in one sentence."""
    if what.startswith(_SWAP):
        found = _of_swap(server.call(lambda client: client.swap(what)))
    elif what.startswith(_LEASE):
        found = server.call(lambda client: client.lease(what))
    else:
        ids = f"of a lease ({_LEASE}...) or of a swap ({_SWAP}...)"
        raise click.UsageError(f"{what!r} is no id {ids}; `swapper status` and `swapper swaps` show them")
    if as_json:
        return print_json({name: found[name] for name in ("id", "state", "position", "eta_s", "explain")})
    return click.echo(found["explain"])


def _of_swap(swap: Json) -> Json:
    """A swap in the shape of what is said of a lease."""
    sides = [", ".join(swap[side]) or "nobody" for side in ("from", "to")]
    why = f" ({swap['explain']})" if swap["explain"] else ""
    said = f"{swap_line(swap)}; from {sides[0]} to {sides[1]}{why}; its steps: swapper swaps {swap['id']}"
    return {"id": swap["id"], "state": swap["state"], "position": None, "eta_s": None, "explain": said}
