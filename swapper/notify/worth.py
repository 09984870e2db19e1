"""Which events of the log a person is told, under which title, how badly. Pure.

Invariant: what is told is the sentence that the alert itself, or `explain`, says. Two notices with one `key` tell of
the same thing; the book (book.py) lets it be told only so often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from swapper.core.commit import Alert, AlertKind
from swapper.core.conversations import ProofResult
from swapper.core.jobs import Job, JobState
from swapper.store import codec
from swapper.store.protocol import StoredEvent


class Severity(StrEnum):
    """In apprise's own words (its NotifyType); the later the worse."""

    INFO = "info"
    SUCCESS = "success"
    WARNING = "warning"
    FAILURE = "failure"

    @property
    def rank(self) -> int:
        """0 is the least."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell. `about`: the tenant or holder, empty where it is about the card (which is empty for all).

    `at_ms`: when it was logged, by the store's clock. `over`: what the same `key` told is so no more.
    """

    kind: str
    card: str
    about: str
    title: str
    text: str
    severity: Severity
    at_ms: int
    over: bool = False

    @property
    def key(self) -> str:
        """Kind, card and who it is about."""
        return f"{self.kind} {self.card} {self.about}"


_ALERTS: Mapping[AlertKind, tuple[str, Severity]] = {
    AlertKind.FAULT: ("{card} is at fault", Severity.FAILURE),
    AlertKind.FOREIGN_VRAM: ("VRAM of {card} is taken by others", Severity.WARNING),
    AlertKind.OVER_NEED: ("{about} takes more of {card} than its need", Severity.WARNING),
    AlertKind.NOT_LOADED: ("{about} could not be loaded", Severity.FAILURE),
    AlertKind.NOT_STARTED: ("the server of {about} does not start", Severity.FAILURE),
    AlertKind.GONE: ("{about} is gone from {card}", Severity.WARNING),
    AlertKind.STRANGER: ("{about} was loaded by somebody else", Severity.INFO),
    AlertKind.HUNG: ("{about} hung", Severity.WARNING),
    AlertKind.UNSAVED: ("a conversation of {about} was not saved", Severity.WARNING),
    AlertKind.COLD: ("a conversation of {about} is cold", Severity.WARNING),
    AlertKind.DEMOTED: ("conversations of {about} are kept in another way", Severity.WARNING),
    AlertKind.PUT_BACK: ("the store was put back", Severity.FAILURE),
    AlertKind.CLOCK: ("the store's clock was stepped", Severity.INFO),
    AlertKind.STATE_DIR: ("the state folder is not as it was", Severity.FAILURE),
    AlertKind.OTHER: ("something happened on {card}", Severity.WARNING),
}
_OVER: Mapping[AlertKind, str] = {
    AlertKind.FAULT: "{card} is free again",
    AlertKind.FOREIGN_VRAM: "VRAM of {card} is taken by others no more",
    AlertKind.OVER_NEED: "{about} keeps to its need again",
    AlertKind.NOT_STARTED: "the server of {about} was started",
}
_OF_THE_CARD = frozenset({AlertKind.FAULT})
"""Told of the card, whoever holds it: who it is may differ from one look to the next."""
_OF_ALL = frozenset({AlertKind.PUT_BACK, AlertKind.CLOCK, AlertKind.STATE_DIR})
"""Raised for every card, and told once."""
_OF_THE_TENANT = frozenset({AlertKind.COLD})
"""Also told by an event that names no card."""


class _Window(msgspec.Struct):
    """What is read of the event `window`."""

    state: str
    card: str | None = None
    name: str | None = None
    explain: str | None = None
    reason: str | None = None


_WINDOW = msgspec.json.Decoder(_Window)


def worth_telling(event: StoredEvent) -> Notice | None:
    """What a person is told of an event; None where that is nothing, or where the event cannot be read."""
    try:
        match event.type:
            case "alert":
                return _alert(codec.alert_of(event), _at_ms(event))
            case "conversation":
                return _conversation(event)
            case "job":
                return _job(event, codec.job(event.data))
            case "window":
                return _window(event, _WINDOW.decode(event.data))
            case _:
                return None
    except msgspec.MsgspecError:  # of another release: the log has it
        return None


def _alert(alert: Alert, at_ms: int) -> Notice:
    kind = alert.kind
    about = "" if kind in _OF_THE_CARD | _OF_ALL else _who(alert.data)
    card = "" if kind in _OF_ALL | _OF_THE_TENANT else alert.card
    words, severity = _ALERTS[kind]
    if alert.over:
        words, severity = _OVER.get(kind, f"{words}: no more"), Severity.SUCCESS
    title = words.format(card=alert.card, about=about or alert.card)
    return Notice(kind, card, about, title, alert.text, severity, at_ms, alert.over)


def _who(data: Mapping[str, object]) -> str:
    tenant, holders = data.get("tenant"), data.get("holders")
    if tenant:
        return str(tenant)
    return ", ".join(sorted(map(str, holders))) if isinstance(holders, list | tuple) else ""  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _conversation(event: StoredEvent) -> Notice | None:
    """An answer, or a replay that failed, showed it to be cold."""
    talk = codec.conversation_of(event)
    if talk.result is not ProofResult.COLD:
        return None
    title, severity = _ALERTS[AlertKind.COLD]
    text = (
        f"a conversation of {talk.tenant} ({talk.tokens:,} tokens) came back cold: {talk.reason or 'it was read anew'}"
    )
    return Notice(AlertKind.COLD, "", talk.tenant, title.format(about=talk.tenant), text, severity, _at_ms(event))


def _job(event: StoredEvent, job: Job) -> Notice | None:
    if job.state is not JobState.FAILED:
        return None
    text = f"job {job.id} of {job.recipe} failed: {job.reason or f'swapper job log {job.id} says why'}"
    return Notice("job", "", job.recipe, f"a job of {job.recipe} failed", text, Severity.FAILURE, _at_ms(event))


def _window(event: StoredEvent, window: _Window) -> Notice | None:
    if window.state != "missed":
        return None
    name = window.name or event.subject
    text = f"window {name} was missed: {window.explain or window.reason or 'swapper window list shows the next start'}"
    return Notice("window", window.card or "", name, f"window {name} was missed", text, Severity.WARNING, _at_ms(event))


def _at_ms(event: StoredEvent) -> int:
    return int(event.id.partition("-")[0])
