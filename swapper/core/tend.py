"""A resident's conversations looked after while it serves: one that lies on disk and is asked for comes back. Pure.

This runs as a swap of its own that moves nobody, so that it is fenced, resumed and answered like any other, and no
other swap begins beside it; it is not listed among the swaps.
"""

from __future__ import annotations

from swapper.core import keeping
from swapper.core.commit import Commit
from swapper.core.conversations import Conversation
from swapper.core.draft import Draft
from swapper.core.spec import Spec
from swapper.core.steps import PLACED, enter
from swapper.core.types import Card, Report, Step, Swap, World

ANY_SLOT = -1
"""The agent chooses: an empty slot, or the one that was used least recently, which is saved first."""


def on_wanted(world: World, spec: Spec, report: Report, *, swap_id: str, token: int) -> Commit | None:
    """A gateway has a call whose conversation lies on disk. Data: `snapshot`, `tokens`, `id`, `links`, `talks`."""
    configured = spec.tenants.get(report.tenant or "")
    if configured is None:
        return None
    card = world.cards.get(configured.card) or Card(configured.card)
    draft = Draft(world, spec, card)
    snapshot = str(report.data.get("snapshot"))
    gate = world.gates.get(configured.id)
    if card.swap is not None and card.swap.tends and any(c.snapshot == snapshot for c in card.swap.conversations):
        return None  # it is on its way, and all gateways are told when it is there
    if card.swap is not None or configured.id not in card.residents or gate is None or not gate.open:
        why = "the card is being handed over" if card.swap is not None else f"{configured.id} does not serve"
        again = card.swap is not None and card.swap.tends is not None  # that takes a moment, then it may come
        said = {"snapshot": snapshot, "ok": False, "detail": why, "again": again, "stays": True}
        draft.order(PLACED, configured.id, said)
        return draft.commit()
    talk = Conversation(configured.id, ANY_SLOT, snapshot, 0, 0, saved=True)
    now = world.now_ms
    draft.begin(
        Swap(
            swap_id,
            card.name,
            f"conversation of {configured.id}",
            token,
            (),
            (),
            Step.RESTORE,
            now,
            now,
            conversations=(talk,),
            known=keeping.talks(configured.id, report),
            tends=configured.id,
        )
    )
    enter(draft, Step.RESTORE)
    return draft.commit()
