"""A store that was put back: how it is noticed, and what is said of it. Pure.

A token is committed before anybody hears of it. A higher one than the store has, known to an agent that obeyed it or
to a coordinator that gave it out, proves that the store lost something. What it lost it cannot name.
"""

from __future__ import annotations

from swapper.core.commit import Alert, AlertKind, Commit
from swapper.core.spec import Spec
from swapper.core.types import World


def on_mark(world: World, spec: Spec, mark: int) -> Commit | None:
    """An alert for each card when `mark` is above the counter, which is to be raised right after; else None."""
    if mark <= world.token:
        return None
    text = (
        f"the store is an older copy of itself, or a new one: token {mark} was given out, and it knows of none above "
        f"{world.token}; leases asked for or granted since then are lost, and each card is taken as its agent sees it"
    )
    data = {"mark": str(mark), "token": str(world.token)}
    return Commit(alerts=tuple(Alert(name, text, data, AlertKind.PUT_BACK) for name in spec.cards))
