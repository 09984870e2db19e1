"""A swap for calls that nobody makes any more: turned back, or finished where that is the shorter way. Pure.

Invariant: only a swap that calls of a model caused is given up, and only while a gateway is there to say that none of
them waits. Before the release it turns back at once: nothing was unloaded, the gates open again. Later it is given up
once nobody has waited for GRACE_MS, since a client that lost its connection comes back within that. What is being
loaded is stopped, and seen gone, before anybody else is let onto the card. A model that is loaded stays.
"""

from __future__ import annotations

from swapper.core import policy
from swapper.core.answers import compensate
from swapper.core.commit import Commit
from swapper.core.draft import Draft
from swapper.core.errand import Verb
from swapper.core.machine import BEFORE_RELEASE
from swapper.core.spec import Spec
from swapper.core.types import Card, Step, Swap, World

GRACE_MS = 2_000
"""Clients and proxies that try again after a broken connection mostly do so within this."""
NEARLY_MS = 1_000
"""About what it takes to stop a load: one that is so near its end is finished whoever waits."""
_UNLIKE = 2
"""A load that has taken so many times what it took before tells nothing of its end."""


def note(world: World, spec: Spec, unwanted: dict[str, int]) -> None:
    """Keep since when nobody has waited for what each card's swap brings, store ms; nothing where somebody does."""
    for name in spec.cards:
        card = world.cards.get(name)
        if card is None or card.swap is None or not _is_unwanted(world, card.swap):
            unwanted.pop(name, None)
        else:
            unwanted.setdefault(name, world.now_ms)


def due(world: World, spec: Spec, card: Card, since_ms: int | None) -> Commit | None:
    """What follows from nobody waiting any more; `since_ms` as noted, None: not yet noted."""
    swap = card.swap
    if swap is None or not _is_unwanted(world, swap):
        return None
    waited_ms = 0 if since_ms is None else world.now_ms - since_ms
    if swap.stage not in BEFORE_RELEASE and (waited_ms < GRACE_MS or not turns_back(world, spec, card, swap)):
        return None
    draft = Draft(world, spec, card)
    compensate(draft, f"nobody waits for {', '.join(swap.to)} any more")
    return draft.commit()


def _is_unwanted(world: World, swap: Swap) -> bool:
    """Whether it is for calls of a model, and they are gone, nor is it asked for by hand.

    Without a gateway nobody can know.
    """
    if swap.back or not policy.for_calls(swap) or not world.gateways:
        return False
    if any(one.verb is Verb.LOAD and one.about(tenant) for one in world.errands for tenant in swap.to):
        return False
    return not any(d.tenant in swap.to and (d.waiting or d.running) for d in world.demand)


def turns_back(world: World, spec: Spec, card: Card, swap: Swap) -> bool:
    """Whether giving up is cheaper than finishing, after the release.

    Before the load it is where somebody left for it or others wait: what would be loaded would have to leave again.
    While it is loaded, what is left of that (by what the last load took) is held against what is waited for: others
    wait for all of it, those who left for it come back by loads of their own. What nobody measured is taken for long.
    """
    others = policy.others_wait(world, spec, card, but=swap.to)
    if swap.stage is Step.VACATE:
        return others or bool(swap.from_)
    if swap.stage is not Step.LOAD:
        return False
    left_ms = _left(world, card, swap)
    if others:
        return left_ms is None or left_ms > NEARLY_MS
    if not swap.from_:
        return False
    prices = [card.loads.get(tenant) for tenant in swap.from_]
    price_ms = sum(price or 0 for price in prices)
    return left_ms is None or None in prices or left_ms > price_ms


def _left(world: World, card: Card, swap: Swap) -> int | None:
    """Milliseconds until all of it is loaded; None where that cannot be told."""
    left: list[int] = []
    for record in swap.steps:
        if record.step is not Step.LOAD or record.ms is not None:
            continue
        took, so_far = card.loads.get(record.tenant or ""), world.now_ms - record.started_ms
        if took is None or so_far > took * _UNLIKE:
            return None
        left.append(max(0, took - so_far))
    return max(left, default=0)
