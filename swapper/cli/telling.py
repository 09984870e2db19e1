"""Events and swaps in words for people: who, what became of it, and why, one line each. Pure.

Invariant: whatever an event holds it has a line, also one of a newer release, and no line shows JSON or breaks in two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from swapper.cli.common import Json, mib

_GOOD = frozenset({"granted", "done", "warm", "open", "steady", "released", "over"})
_BAD = frozenset({"fault", "failed", "expired", "revoked", "cold", "missed"})
_NEUTRAL = frozenset({"cancelled", "closed", "skipped"})
_OUTCOMES = ("warm", "cold", "unproved", "on disk", "saved", "not saved")


@dataclass(frozen=True, slots=True)
class Told:
    """One event: `who` it is about, the state it is in now, and a sentence."""

    who: str
    state: str
    text: str

    @property
    def colour(self) -> str:
        """Of the state, on a terminal: green for what is well, red for what is not, yellow for what is under way."""
        if self.state in _BAD:
            return "red"
        if self.state in _GOOD:
            return "green"
        return "white" if self.state in _NEUTRAL else "yellow"


def told(kind: str, data: Json) -> Told:
    """An event of this type, by its after-image."""
    who, state = str(data.get("id") or ""), str(data.get("state") or "")
    try:
        match kind:
            case "lease":
                text = _lease(data)
            case "swap":
                text = _swap(data)
            case "card":
                text = _card(data)
            case "tenant":
                text = {"open": "its calls are let in", "closed": "its calls wait"}.get(state, "")
            case "conversation":
                who, text = str(data["model"]), _conversation(data)
            case "job":
                text = f"{data['recipe']} of {data['owner']}{_because(data.get('reason'))}"
            case "alert":
                who = str(data.get("card") or who)
                state = "over" if data.get("over") else str(data.get("kind") or state).replace("_", " ")
                text = str(data["text"])
            case _:
                text = _anything(data)
    except (KeyError, TypeError, AttributeError):  # of another release: what every event has is told
        text = _anything(data)
    return Told(who, state, " ".join(text.split()))


def took(ms: int) -> str:
    """Milliseconds for people: `406 ms`, `3.9 s`, `2 min 5 s`."""
    if ms < 1_000:
        return f"{ms} ms"
    if ms < 59_950:
        return f"{ms / 1000:.1f} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    return f"{minutes} min {seconds} s"


def moves(swap: Json) -> str:
    """Who leaves and who comes: `llama/med out, comfyui in`; `-` where nobody does."""
    return ", ".join([f"{one} out" for one in swap["from"]] + [f"{one} in" for one in swap["to"]]) or "-"


def talks(conversations: Sequence[Json]) -> str:
    """How many of a swap's conversations came to what: `2 warm, 1 cold`; nothing for none."""
    counts = Counter(map(_outcome, conversations))
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])


def _outcome(talk: Json) -> str:
    if talk["result"]:
        return str(talk["result"])
    if str(talk["reason"] or "").startswith("on disk"):
        return "on disk"
    return "saved" if talk["saved"] else "not saved"


def _lease(lease: Json) -> str:
    whole = f"all of {lease['card']}" if lease["card"] else "any whole card"
    part = whole if lease["vram_mib"] is None else f"{mib(lease['vram_mib'])} of {lease['card'] or 'any card'}"
    label = f" {lease['label']!r}" if lease["label"] else ""
    holder = lease["holder"]
    tenant = f" for {holder}" if holder and not holder.startswith("process:") else ""
    asked = f"{part}, {lease['owner']}{label}{tenant}"
    said = lease["reason"] or lease["explain"]
    return f"{said} ({asked})" if said else asked


def _swap(swap: Json) -> str:
    carried = talks(swap["conversations"])
    if swap["outcome"] is None:
        over = [step for step in swap["steps"] if step["ms"] is not None]
        said = [f"{over[-1]['step']} took {took(over[-1]['ms'])}"] if over else []
    else:
        said = [] if swap["overhead_ms"] is None else [f"in {took(swap['overhead_ms'])}"]
    said += [f"conversations: {carried}"] if carried else []
    news = f"{_because(', '.join(said), '; ')}{_because(swap['reason'])}"
    return f"{swap['card']}: {moves(swap)}{news} ({swap['cause']})"


def _card(card: Json) -> str:
    if card["fault"]:
        return str(card["fault"]["reason"])
    said = [f"on it: {', '.join(card['residents'])}" if card["residents"] else "no tenant on it"]
    leases = [card["lease"]] if card["lease"] else [hold["lease"] for hold in card["holds"]]
    said += [f"held by {one}" for one in leases]
    owed = cast("list[str]", card["return_to"] or [])
    away = [one for one in owed if one not in card["residents"]]
    said += [f"comes back: {', '.join(away)}"] if away else []
    said += [f"{tenant} could not be loaded: {failure['reason']}" for tenant, failure in card["failed"].items()]
    return "; ".join(said)


def _conversation(talk: Json) -> str:
    where = f" in slot {talk['slot']}" if talk["slot"] >= 0 else ""
    reused = "" if talk["cache_n"] is None else f", {talk['cache_n']:,} reused"
    return f"{talk['tokens']:,} tokens{where}{reused}{_because(talk['reason'])}"


def _anything(data: Json) -> str:
    """The sentence of an event that is not known here."""
    known = (data.get(name) for name in ("text", "reason", "explain", "cause"))
    return next((said for said in cast("Any", known) if isinstance(said, str) and said), "")


def _because(said: object, joint: str = ": ") -> str:
    return f"{joint}{said}" if said else ""
