"""What an unload of a model is judged by: calls in flight, and what was said of its slots when that was ordered.

Invariant: it judges one moment, and remembers nothing. An order outlives the store that gave it: what is carried out
after a rollback is judged by what was known when it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swapper.core.types import Card, Step, Swap
from tests.sim.seen import Order
from tests.sim.whose import Heads


@dataclass(frozen=True, slots=True)
class Unload:
    """`in_flight`: calls at live gateways, `used`: slot -> tokens; `read`: whose talk is in a file, None: no file."""

    tenant: str
    in_flight: Mapping[str, int]
    used: Mapping[int, int]
    read: Callable[[str], str | None]

    def wrong(self, swap: Swap | None, heads: Heads, *, put_back: bool) -> str | None:
        """Which promise it breaks, where it is part of this swap, or of none.

        `put_back`: the store was, and a gateway may have missed the word that a snapshot was replaced. That one is said
        to be gone as the model is loaded.
        """
        busy = {name: count for name, count in self.in_flight.items() if count}
        # One that was fenced out before may wake and send what it held.
        known = busy if swap is None else busy.keys() & {*swap.told}
        if known and (swap is None or swap.forced_ms is None):
            return f"{self.tenant} is unloaded with calls in flight at {busy} (S4)"
        if swap is None or self.tenant not in swap.from_ or busy:
            return None
        lines = [talk for talk in swap.conversations if talk.tenant == self.tenant]
        named = [talk for talk in lines if not (put_back and talk.reason)]
        if swap.stage is Step.RELEASE and (wrong := heads.wrongly_saved(named, self.read)) is not None:
            return f"{self.tenant} is unloaded, and {wrong} (N3)"
        if any(talk.slot < 0 and not talk.snapshot and talk.reason for talk in lines):
            return None  # a line for all that nobody can name
        told = [talk.slot for talk in lines if talk.saved or talk.reason]
        untold = [slot for slot in self.used if slot not in told]
        if untold and len(told) < len(self.used):  # a recall may have brought a conversation into another slot
            return f"{self.tenant} is unloaded with slots {untold} neither saved nor stated (N3)"
        return None


def releases(card: Card) -> Mapping[Order, Swap]:
    """The releases that are ordered just now, and the swap as it was then."""
    swap = card.swap
    found = () if swap is None else (c for c in swap.pending if c.verb == Step.RELEASE and c.tenant is not None)
    return {(card.name, c.tenant or "", (c.token, c.n)): swap for c in found if swap is not None}
