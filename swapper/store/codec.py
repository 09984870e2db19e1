"""How the nouns travel: leases as flat hashes of strings, everything else as JSON documents.

Invariant: decoding gives back what was encoded, and fields that a newer release added are ignored. Pure: no I/O, no
clock. What the library (library.lua) needs to know of a document is sent beside it, as strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import cast

import msgspec

from swapper.core.byhand import QUEUED, queued_swap
from swapper.core.commit import Alert, Commit, LeaseChange
from swapper.core.conversations import Conversation
from swapper.core.errand import Errand
from swapper.core.jobs import Job
from swapper.core.orders import Command, Report
from swapper.core.types import Card, Demand, Gate, Lease, LeaseRequest, LeaseState, Swap
from swapper.store.protocol import StoredEvent

_ENCODER = msgspec.json.Encoder()
_REQUEST = msgspec.json.Decoder(LeaseRequest)
_CARD = msgspec.json.Decoder(Card)
_SWAP = msgspec.json.Decoder(Swap)
_COMMAND = msgspec.json.Decoder(Command)
_REPORTS = msgspec.json.Decoder(tuple[Report, ...])
_CONVERSATION = msgspec.json.Decoder(Conversation)
_JOB = msgspec.json.Decoder(Job)
_ERRAND = msgspec.json.Decoder(Errand)
_ALERT = msgspec.json.Decoder(Alert)
_DEMAND = msgspec.json.Decoder(tuple[Demand, ...])
# Lenient: in a lease's after-image the token is a string, because JSON readers with doubles would lose digits.
_LEASE = msgspec.json.Decoder(Lease, strict=False)


def encode(value: object) -> str:
    """One of the frozen dataclasses, or a tuple of them, as JSON text; what UTF-8 cannot say becomes `?`."""
    try:
        return _ENCODER.encode(value).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(_sayable(msgspec.to_builtins(value))).decode()


def _sayable(value: object) -> object:
    """A process may have any bytes for its name, and a file too: such a text must not keep the rest from being told."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {_sayable(key): _sayable(one) for key, one in cast("dict[object, object]", value).items()}
        case list() | tuple():
            return [_sayable(one) for one in cast("list[object]", value)]
        case _:
            return value


def image(head: Mapping[str, str], value: object) -> str:
    """A dataclass as JSON text with `head` before its own fields: `id` and `state`, which every event has."""
    return f"{encode(head)[:-1]},{encode(value)[1:]}"


def card(text: str) -> Card:
    """A card document."""
    return _CARD.decode(text)


def swap(text: str) -> Swap:
    """A swap document."""
    return _SWAP.decode(text)


def command(text: str) -> Command:
    """A command document."""
    return _COMMAND.decode(text)


def reports(text: str) -> tuple[Report, ...]:
    """The reports of one entry of the inputs."""
    return _REPORTS.decode(text)


def demand(text: str) -> tuple[Demand, ...]:
    """The demand records of one gateway."""
    return _DEMAND.decode(text)


def pairs(flat: Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    """A hash as the server answered it: a list of alternating names and values (RESP2), or a map already."""
    if isinstance(flat, Mapping):
        return flat
    return dict(zip(flat[::2], flat[1::2], strict=True))


def lease(flat: Sequence[str] | Mapping[str, str]) -> Lease:
    """A lease from its flat hash; an absent field is None."""
    fields = pairs(flat)

    def number(name: str) -> int | None:
        value = fields.get(name)
        return None if value is None else int(value)

    progress = fields.get("progress")
    return Lease(
        id=fields["id"],
        request=_REQUEST.decode(fields["request"]),
        seq=int(fields["seq"]),
        created_ms=int(fields["created_ms"]),
        state=LeaseState(fields["state"]),
        card=fields.get("card"),
        reason=fields.get("reason"),
        token=number("token"),
        granted_ms=number("granted_ms"),
        ended_ms=number("ended_ms"),
        expires_ms=number("expires_ms"),
        revoke_ms=number("revoke_ms"),
        progress=None if progress is None else float(progress),
        swap_id=fields.get("swap_id"),
        explain=fields.get("explain"),
    )


@lru_cache(maxsize=4096)
def lease_image(image: str, expires_ms: str = "", progress: str = "") -> Lease:
    """A lease from its after-image and what heartbeats move beside it (`` for None).

    Cached: the same waiting leases are read again and again, and a Lease is immutable.
    """
    lease = _LEASE.decode(image)
    if not expires_ms:
        return lease
    return replace(lease, expires_ms=int(expires_ms), progress=float(progress) if progress else None)


def gates(flat: Sequence[str] | Mapping[str, str]) -> dict[str, Gate]:
    """Gates from their hash, each `EPOCH:0` (closed) or `EPOCH:1` (open)."""
    found: dict[str, Gate] = {}
    for tenant, text in pairs(flat).items():
        epoch, _, is_open = text.partition(":")
        found[tenant] = Gate(int(epoch), is_open == "1")
    return found


def order(lease: Lease) -> tuple[bool, int, int]:
    """Where a lease stands in a view of the store: held ones first, then class rank, then arrival."""
    waiting = lease.state is LeaseState.QUEUED
    return waiting, lease.request.klass.rank if waiting else 0, lease.seq


def optional(value: int | str | float | None) -> str:
    """An argument of a library function; `` stands for None."""
    return "" if value is None else str(value)


def _change(change: LeaseChange) -> dict[str, object]:
    given = {
        "state": change.state,
        "reason": change.reason,
        "token": change.token,
        "card": change.card,
        "swap_id": change.swap_id,
        "explain": change.explain,
        "revoke_ms": change.revoke_ms,
        "lives_ms": change.lives_ms,
        "shift_ms": change.shift_ms,
        "only_if_expired": "1" if change.only_if_expired else None,
    }
    fields: dict[str, object] = {name: str(value) for name, value in given.items() if value is not None}
    return fields | {"id": change.id, "expect": sorted(change.expect)}


def card_text(value: Card) -> str:
    """A card as it is written and logged: its version is that of the card it was read as, plus one."""
    return image({"id": value.name, "state": value.phase}, replace(value, version=value.version + 1))


def swap_text(value: Swap) -> str:
    """A swap as it is written and logged."""
    return image({"state": value.outcome or value.stage}, value)


def job_text(value: Job) -> str:
    """A job as it is written and logged: its version is that of the job it was read as, plus one."""
    return encode(replace(value, version=value.version + 1))


def job(text: str) -> Job:
    """A job as it was written."""
    return _JOB.decode(text)


def errand(text: str) -> Errand:
    """An errand as it was written."""
    return _ERRAND.decode(text)


def errand_text(value: Errand) -> str:
    """An errand without the moment it came, which the store adds, and without the last brace."""
    return _without(value, "asked_ms")


def queued_text(value: Errand) -> str:
    """The swap that it will be as it is logged, without the moments and the last brace as well."""
    return f"{encode({'state': QUEUED})[:-1]},{_without(queued_swap(value), 'started_ms', 'stage_ms')[1:]}"


def _without(value: object, *names: str) -> str:
    fields = cast("dict[str, object]", msgspec.to_builtins(value))
    return encode({name: field for name, field in fields.items() if name not in names})[:-1]


def gate_text(tenant: str, gate: Gate) -> str:
    """A gate as it is logged."""
    return encode({"id": tenant, "state": "open" if gate.open else "closed", "epoch": gate.epoch})


def _card(value: Card) -> dict[str, str]:
    holds = " ".join(hold.lease for hold in value.holds)
    return {"name": value.name, "version": str(value.version), "holds": holds, "doc": card_text(value)}


def _gate(tenant: str, gate: Gate) -> dict[str, str]:
    is_open = "1" if gate.open else "0"
    return {"tenant": tenant, "epoch": str(gate.epoch), "open": is_open, "doc": gate_text(tenant, gate)}


def _swap(value: Swap) -> dict[str, str]:
    return {"id": value.id, "card": value.card, "doc": swap_text(value)}


def _alert(alert: Alert) -> dict[str, str]:
    head = {"id": alert.card, "state": "over" if alert.over else "raised"}
    return {"type": "alert", "subject": alert.card, "doc": image(head, alert)}


def _conversation(talk: Conversation) -> dict[str, str]:
    head = {"id": talk.snapshot, "state": conversation_state(talk)}
    return {"type": "conversation", "subject": talk.snapshot, "doc": image(head, talk)}


def said(value: Commit) -> list[dict[str, str]]:
    """The events of a commit that are no thing of their own: `type`, `subject` and `doc` of each."""
    return [*map(_conversation, value.conversations), *map(_alert, value.alerts)]


def conversation_state(talk: Conversation) -> str:
    """The `state` of a conversation's events: `unproved|warm|cold` once restored or given up, before `saved|lost`."""
    return talk.result or ("saved" if talk.saved else "lost")


def _once(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"a commit names the {kind} {name} twice")
        seen.add(name)


def check(value: Commit) -> None:
    """Raise ValueError when a commit names a thing twice, or its tokens do not rise."""
    _once("card", (card.name for card in value.cards))
    _once("lease", (change.id for change in value.leases))
    _once("swap", (swap.id for swap in value.swaps))
    if any(later <= token for token, later in pairwise(value.tokens)):
        raise ValueError(f"a commit gives out tokens that do not rise: {value.tokens}")


def commit(value: Commit) -> str:
    """The one argument of the library's `commit`. Raises what `check` raises."""
    check(value)
    return encode(
        {
            "cards": [_card(card) for card in value.cards],
            "leases": [_change(change) for change in value.leases],
            "swaps": [_swap(swap) for swap in value.swaps],
            "gates": [_gate(tenant, gate) for tenant, gate in value.gates.items()],
            "commands": [{"executor": order.executor, "doc": encode(order)} for order in value.commands],
            "tokens": [str(token) for token in value.tokens],
            "between": [str(ms) for ms in value.between_ms or ()],
            "stepped": [str(ms) for ms in value.stepped or ()],
            "members": optional(value.members_ms),
            "over": value.over,
            "said": said(value),
        }
    )


def lease_of(event: StoredEvent) -> Lease:
    """The after-image of a `lease` event. `expires_ms` and `progress` are None: heartbeats move them silently."""
    return lease_image(event.data)


def card_of(event: StoredEvent) -> Card:
    """The after-image of a `card` event."""
    return _CARD.decode(event.data)


def swap_of(event: StoredEvent) -> Swap:
    """The after-image of a `swap` event."""
    return _SWAP.decode(event.data)


def conversation_of(event: StoredEvent) -> Conversation:
    """The after-image of a `conversation` event."""
    return _CONVERSATION.decode(event.data)


def alert_of(event: StoredEvent) -> Alert:
    """What an `alert` event tells; of an older release, or a newer one's kind, it is of the kind `other`."""
    return _ALERT.decode(event.data)
