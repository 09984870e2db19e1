"""What is said of conversations outside a swap's own answers: proofs, replays, and calls that want one from disk.

Invariant: each is told to the shipped core as the coordinator tells it, and told twice it must change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from swapper.core import reuse, tend, turn
from swapper.core.commit import Commit
from swapper.core.conversations import ProofResult
from swapper.core.orders import Report
from swapper.core.types import Card, Swap
from tests.model.promises import Broken
from tests.model.rig import Rig

_OnLine = Callable[[Card, Swap, Report], Commit | None]


def prove(rig: Rig, swap_id: str, at: int, result: ProofResult, *, continued: bool) -> None:
    """An answer shows whether a conversation was reused."""
    _about(rig, swap_id, at, reuse.on_proof, "ok", result=str(result), continued=continued)


def replayed(rig: Rig, swap_id: str, at: int, outcome: str) -> None:
    """A gateway has sent a conversation's last request again, or could not."""
    _about(rig, swap_id, at, reuse.on_recalled, outcome, slot=0, tokens=1000)


def _about(rig: Rig, swap_id: str, at: int, on_line: _OnLine, outcome: str, **data: object) -> None:
    swap = rig.library.swap(swap_id)
    assert swap is not None
    talk = swap.conversations[at]
    told = {"snapshot": talk.snapshot, "swap": swap_id, **data}
    report = Report("gateway:g", swap.card, talk.tenant, 0, 0, "told", outcome, data=told)
    rig.write(lambda world: on_line(turn.card_of(world, swap.card), swap, report))
    after = rig.library.swap(swap_id)
    assert after is not None
    if on_line(turn.card_of(rig.read(), swap.card), after, report) is not None:
        raise Broken("what was said of a conversation was taken twice")


def want(rig: Rig, name: str, tenant: str, snapshot: str) -> None:
    """A call at a gateway goes on with a conversation that lies on disk."""
    gateway = rig.gateways[name]
    gateway.wanting.add(snapshot)
    data = {"snapshot": snapshot, "talks": gateway.talks.get(tenant, [])}
    card = rig.spec.tenants[tenant].card
    report = Report(f"gateway:{name}", card, tenant, 0, 0, "wanted", "ok", data=data)
    swap_id = rig.name("sw")
    rig.write(lambda world: tend.on_wanted(world, rig.spec, report, swap_id=swap_id, token=world.next_token))
