"""What a decision asks the store to write, as one value: the only way a card or a grant changes.

Invariant: a Commit either lands whole or not at all. Each card it names must still have the version the decision was
made on, each lease it touches must still be in one of the states the decision expected, each errand it ends must still
be open, and every token it gives out must be higher than any before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from swapper.core.conversations import Conversation
from swapper.core.orders import Command
from swapper.core.types import Card, Gate, LeaseState, Swap

_GIVEN_UP = frozenset({LeaseState.CANCELLED, LeaseState.EXPIRED, LeaseState.FAILED})
LIFE: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.QUEUED: _GIVEN_UP | {LeaseState.PREPARING, LeaseState.GRANTED},
    LeaseState.PREPARING: _GIVEN_UP | {LeaseState.QUEUED, LeaseState.GRANTED},
    LeaseState.GRANTED: frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED}),
}
"""What may follow a state; one that is absent is final. The store refuses everything else (library.lua has it too)."""


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A guarded change of one lease; fields left None stay as they are.

    `expect`: the states it may be in. `only_if_expired`: the store also checks `expires_ms <= now`.
    The store stamps `granted_ms` and the first `expires_ms` on a grant and `ended_ms` on an end, with its own clock.
    `lives_ms`: what has an expiry expires so far from the store's now. `shift_ms` moves `created_ms`, `granted_ms` (no
    further than to now) and `revoke_ms`.
    """

    id: str
    expect: frozenset[LeaseState]
    state: LeaseState | None = None
    reason: str | None = None
    token: int | None = None
    card: str | None = None
    swap_id: str | None = None
    explain: str | None = None
    revoke_ms: int | None = None
    lives_ms: int | None = None
    shift_ms: int | None = None
    only_if_expired: bool = False


class AlertKind(StrEnum):
    """What an alert is about: alerts of one kind, card and tenant or holder tell of one thing."""

    FAULT = "fault"
    FOREIGN_VRAM = "foreign_vram"
    OVER_NEED = "over_need"
    NOT_LOADED = "not_loaded"
    NOT_STARTED = "not_started"
    GONE = "gone"
    STRANGER = "stranger"
    HUNG = "hung"
    UNSAVED = "unsaved"
    COLD = "cold"
    DEMOTED = "demoted"
    PUT_BACK = "put_back"
    CLOCK = "clock"
    STATE_DIR = "state_dir"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Alert:
    """Something a person should know; becomes an event of type `alert`.

    `data` names its `tenant`, or its `holders` (who keeps VRAM, in words), where it is about one. `over`: what an
    earlier alert of its kind, card and tenant or holders told is so no more.
    """

    card: str
    text: str
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    kind: AlertKind = AlertKind.OTHER
    over: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """Cards (each with the version it was read at; the store writes version + 1), leases, swaps, gates, commands.

    `tokens` are those this decision gives out, rising: the counter must still be below the first, and becomes the last.
    `between_ms`: what the store's clock must show, else it was stepped since, and nobody has said so yet.
    `stepped`: what World.stepped_ms must be, and what it becomes. `members_ms`: every gateway that is a member, or was
    one before a step ahead, is one so far from the store's now. `over`: the errands that end with this.

    Every card, lease and swap written becomes an event with its after-image, every conversation and alert an event
    of its own, and commands reach their executors' outboxes, all in the same atomic write.
    """

    cards: tuple[Card, ...] = ()
    leases: tuple[LeaseChange, ...] = ()
    swaps: tuple[Swap, ...] = ()
    gates: Mapping[str, Gate] = field(default_factory=dict[str, Gate])
    commands: tuple[Command, ...] = ()
    conversations: tuple[Conversation, ...] = ()
    alerts: tuple[Alert, ...] = ()
    tokens: tuple[int, ...] = ()
    between_ms: tuple[int, int] | None = None
    stepped: tuple[int, int] | None = None
    members_ms: int | None = None
    over: tuple[str, ...] = ()

    def then(self, later: Commit) -> Commit | None:
        """Both as one write, `later` decided on what this one leaves; None where a lease would change twice.

        Of a card, swap or gate that both name only the later image is written, and told of in the log.
        """
        if {change.id for change in self.leases} & {change.id for change in later.leases}:
            return None
        read_at = {card.name: card.version for card in self.cards}
        cards = {c.name: c for c in self.cards} | {
            c.name: replace(c, version=read_at.get(c.name, c.version)) for c in later.cards
        }
        swaps = {swap.id: swap for swap in (*self.swaps, *later.swaps)}
        return Commit(
            cards=tuple(cards.values()),
            leases=(*self.leases, *later.leases),
            swaps=tuple(swaps.values()),
            gates={**self.gates, **later.gates},
            commands=(*self.commands, *later.commands),
            conversations=(*self.conversations, *later.conversations),
            alerts=(*self.alerts, *later.alerts),
            tokens=(*self.tokens, *later.tokens),
            between_ms=later.between_ms or self.between_ms,
            stepped=later.stepped or self.stepped,
            members_ms=later.members_ms or self.members_ms,
            over=(*self.over, *later.over),
        )


@dataclass(frozen=True, slots=True)
class Committed:
    """The commit landed."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nothing was written; `what` (a card, lease, gate, errand, the tokens or clock) had moved on. Decide again."""

    what: str
