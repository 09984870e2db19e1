"""A resident's conversations looked after while it serves: one that lies on disk and is asked for comes back. Pure.

This runs as a swap of its own that moves nobody, so that it is fenced, resumed and answered like any other, and no
other swap begins beside it; it is not listed among the swaps.

The agent chooses the slot, and saves what lies there. Of a model whose conversations are rewound before a save it says
first which one would have to leave, where that one was used since it came: it is recalled, and leaves after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from swapper.core import comeback, keeping, plan, saving
from swapper.core.commit import Commit
from swapper.core.conversations import Conversation, Strategy
from swapper.core.draft import Draft
from swapper.core.orders import Command, Report
from swapper.core.spec import Spec
from swapper.core.steps import PLACED
from swapper.core.types import Card, Step, Swap, World

ANY_SLOT = -1
"""The agent chooses: an empty slot, or the one that was used least recently, which is saved first."""
REWIND_MS = 5_000
"""A call waits for what comes back: rewinding what leaves for it may take half of its time."""
MOST_COMMANDS = 8
"""After so many, each for a slot that was gone on with meanwhile, whatever makes room leaves as it lies."""


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
        again = card.swap is not None and _is_short(card.swap)  # then it may come
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
    draft.record(Step.RESTORE, configured.id)
    _restore(draft)
    return draft.commit()


def _is_short(swap: Swap) -> bool:
    """Whether it takes a moment only: one conversation, or the last step of a handover, whose gates stand open already.

    The very call that a handover was for may ask then: the gateway hears of its gate before the swap has ended.
    """
    return swap.tends is not None or swap.stage is Step.OPEN


def brings(swap: Swap) -> bool:
    """Whether this is such a swap."""
    return swap.tends is not None and swap.stage is Step.RESTORE


def take(draft: Draft, command: Command, report: Report) -> None:
    """Take an answer; it is not pending any more."""
    ok = report.outcome == "ok"
    match command.verb:
        case keeping.RECALL if ok:
            _rewound(draft, command, report)
        case Step.RESTORE if ok and (leaves := report.data.get("leaves")):
            _leaves(draft, cast("Mapping[str, object]", leaves))
        case Step.RESTORE:
            comeback.restored(draft, command, report)
        case _:
            pass  # it could not be recalled, and leaves as it lies


def go_on(draft: Draft) -> bool:
    """Nothing is pending. True: it did not come yet, and is ordered again, whoever was to be recalled for it."""
    asked = draft.swap.conversations[0]
    if asked.restored or asked.kept or asked.result is not None:
        return False
    _restore(draft)
    return True


def _leaves(draft: Draft, said: Mapping[str, object]) -> None:
    """What would make room is recalled, once; else it leaves as it lies: rewound already, or known to nobody."""
    head, slot, tokens = str(said["id"]), cast("int", said["slot"]), cast("int", said["tokens"])
    talk = next((c for c in saving.newest(draft.swap.known) if head and c.head == head), None)
    sender = None if talk is None or talk.gateway is None else keeping.heir(draft, talk)
    tried = f"{keeping.RECALL} {head} {sender}"
    if talk is None or talk.restored or sender is None or tried in draft.swap.retried:
        as_it_was_kept = talk is not None and talk.restored
        _restore(draft, (slot, tokens), Strategy.REWIND if as_it_was_kept else Strategy.SLOTS)
        return
    draft.update(retried=(*draft.swap.retried, tried))
    args = {"conversation": head, "name": _room(draft.swap), "limit_ms": REWIND_MS, "beside": True}
    args["for"] = draft.swap.conversations[0].snapshot
    draft.command(sender, keeping.RECALL, draft.swap.tends, args)


def _rewound(draft: Draft, command: Command, report: Report) -> None:
    """It stands in its slot as its last request, and may leave."""
    head, slot, tokens = command.args["conversation"], cast("int", report.data["slot"]), report.data["tokens"]
    tokens = cast("int", tokens)
    others = (c if c.slot != slot else replace(c, slot=ANY_SLOT) for c in draft.swap.known)
    known = (replace(c, slot=slot, tokens=tokens, restored=True) if c.head == head else c for c in others)
    draft.update(known=tuple(known))
    _restore(draft, (slot, tokens), Strategy.REWIND)


def _restore(draft: Draft, takes: tuple[int, int] | None = None, strategy: Strategy = Strategy.SLOTS) -> None:
    """Order it; `takes`: the slot and the tokens in it that may make room, which `strategy` made ready."""
    swap = draft.swap
    tenant = cast("str", swap.tends)
    args: dict[str, object] = {"snapshot": swap.conversations[0].snapshot, "slot": ANY_SLOT, "displaced": _room(swap)}
    args["talks"] = [_as_told(c) for c in swap.known]
    if keeping.of(draft.card, tenant).strategy is Strategy.REWIND and swap.next_n < MOST_COMMANDS:
        args["tells"] = True
    if takes is not None:
        args["takes"] = {"slot": takes[0], "tokens": takes[1]}
        args["strategy"] = strategy
    draft.command(draft.agent_of(tenant), Step.RESTORE, tenant, args)


def _room(swap: Swap) -> str:
    """The name under which what makes room is saved."""
    return plan.snapshot_name(cast("str", swap.tends), swap.token, "d")


def _as_told(c: Conversation) -> Mapping[str, object]:
    """A conversation believed to be in the server; `slot` where it was seen."""
    slot = c.slot if c.slot >= 0 else None
    known = {"links": list(c.links), "tokens": c.tokens, "used_ms": c.used_ms, "slot": slot}
    return {"id": c.head, **known, **({"snapshot": c.replaces} if c.replaces else {})}
