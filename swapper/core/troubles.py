"""Which servers could not be started: told once when it begins, and once when it is over. Pure.

Invariant: a server's trouble is told for the cards of its own tenants, and for nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from swapper.core.commit import Alert, AlertKind
from swapper.core.spec import Spec


def not_started(spec: Spec, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Alert]:
    """What is to be told of one host's servers; server -> why it could not be started."""
    for server in sorted(before.keys() | now.keys()):
        why = now.get(server)
        if why == before.get(server):
            continue
        text = line(server, why) if why is not None else f"the server of {server} was started"
        cards = sorted({one.card for one in spec.tenants.values() if one.server == server})
        about = {"tenant": server}
        yield from (Alert(card, text, about, AlertKind.NOT_STARTED, over=why is None) for card in cards)


def line(server: str, why: str) -> str:
    """One sentence for a person."""
    return f"the server of {server} does not start: {why} (it is tried again, every 30 s at the latest)"
