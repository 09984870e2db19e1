"""A store that was put back: how it is noticed, and what is said of it. Pure.

Whatever an agent obeyed was committed with its token before it was sent, so an agent that obeyed a higher token than
the store ever gave out proves that the store lost something. What it lost it cannot name.
"""

from __future__ import annotations

from swapper.core.commit import Alert, Commit
from swapper.core.spec import Spec
from swapper.core.types import World


def on_mark(world: World, spec: Spec, mark: int) -> Commit | None:
    """An alert for each card when `mark` is above the counter, which is to be raised right after; else None."""
    if mark <= world.token:
        return None
    text = (
        f"the store is an older copy of itself, or a new one: an agent has carried out token {mark}, and none above "
        f"{world.token} was given out; leases asked for or granted since then are lost, and each card is taken as its "
        "agent sees it"
    )
    data = {"mark": str(mark), "token": str(world.token)}
    return Commit(alerts=tuple(Alert(name, text, data) for name in spec.cards))
