"""What was told, what waits to be told, and how often a thing may be told: the whole state of who tells, as one value.

Invariant: pure; `now_ms` is an argument. Each notice that is heard is told or counted in one that is told, unless it is
a day old. The same thing (`Notice.key`) is told at most once in `QUIET_MS`, and its end once more; what came meanwhile
is told as one when that is over. What comes within `BURST_MS` is one message, and there are at most `CAP` messages in
`HOUR_MS`: what is beyond waits, and is then one. `at` is the event up to which all of it is counted in here, so that
whoever goes on from a kept book, after any death, tells everything at least once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import msgspec

from swapper.notify.worth import Notice, Severity

QUIET_MS = 15 * 60_000
BURST_MS = 2_000
HOUR_MS = 3_600_000
CAP = 12
"""So many messages an hour at most."""
LATE_MS = 60_000
"""What is told so long after it happened says when that was."""
STALE_MS = 24 * HOUR_MS
"""What happened longer ago is told no more: notifications may have been off meanwhile."""
LINES = 10
"""A message tells so many things, and how many there are beyond."""
WAITING = 50
UNSENT = 20
_TEXT, _BODY = 600, 4_000
"""Characters of one thing's text, and of a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent. `at_ms`: when the first thing in it happened."""

    title: str
    body: str
    severity: Severity
    at_ms: int


@dataclass(frozen=True, slots=True)
class Quiet:
    """A thing that was told. `more` like it came since, the `last` of them; `over`: its end was told, too."""

    until_ms: int
    last: Notice
    more: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class Book:
    """See the module text. `waiting` since `since_ms`, and `beyond` more for which there was no room.

    `sent_ms`: when the messages of the last hour were made. `unsent`: recipient -> what it has still to be sent.
    """

    at: str = "0"
    quiet: Mapping[str, Quiet] = field(default_factory=dict[str, Quiet])
    waiting: tuple[Notice, ...] = ()
    beyond: int = 0
    since_ms: int = 0
    sent_ms: tuple[int, ...] = ()
    unsent: Mapping[str, tuple[Message, ...]] = field(default_factory=dict[str, tuple[Message, ...]])


_BOOK = msgspec.json.Decoder(Book)


def written(book: Book) -> str:
    """The book as text, for the store."""
    return msgspec.json.encode(book).decode()


def read(text: str) -> Book | None:
    """The book that was written so; None where the text is none (of another release)."""
    try:
        return _BOOK.decode(text)
    except msgspec.MsgspecError:
        return None


def hear(book: Book, notice: Notice, now_ms: int) -> Book:
    """Something happened: it waits to be told, or is counted where the same was told lately."""
    if now_ms - notice.at_ms > STALE_MS:
        return book
    book = _rested(book, now_ms)
    told = book.quiet.get(notice.key)
    if told is None:
        return _tell(book, notice, now_ms, Quiet(now_ms + QUIET_MS, notice, over=notice.over))
    if notice.over and not told.over:
        said = notice if not told.more else replace(notice, text=f"{notice.text} (it was so {told.more} more times)")
        return _tell(book, said, now_ms, replace(told, last=notice, more=0, over=True))
    return _with(book, notice.key, replace(told, last=notice, more=told.more + 1))


def turn(book: Book, now_ms: int) -> tuple[Book, Message | None]:
    """What is due now: at most one message, which is in the returned book as made, and has yet to be posted."""
    book = _rested(book, now_ms)
    if not book.waiting or now_ms < _message_ms(book, now_ms):
        return book, None
    message = _folded(book.waiting, book.beyond, now_ms)
    sent = (*(min(ms, now_ms) for ms in book.sent_ms if now_ms - ms < HOUR_MS), now_ms)
    return replace(book, waiting=(), beyond=0, sent_ms=sent), message


def due_ms(book: Book, now_ms: int) -> int | None:
    """When `turn` has something to do next; None while that needs something to happen first."""
    ends = [quiet.until_ms for quiet in book.quiet.values() if quiet.more]
    return min([*ends, *([_message_ms(book, now_ms)] if book.waiting else [])], default=None)


def post(book: Book, message: Message, recipients: Iterable[str]) -> Book:
    """The message is to be sent to each; where too many wait for one, the two that wait longest become one."""
    unsent = dict(book.unsent)
    for one in recipients:
        waiting = (*unsent.get(one, ()), message)
        unsent[one] = waiting if len(waiting) <= UNSENT else (merged(waiting[:2]), *waiting[2:])
    return replace(book, unsent=unsent)


def unpost(book: Book, recipient: str, sent: Iterable[Message]) -> Book:
    """These were sent to it, or are to be sent to it no more."""
    gone = list(sent)
    left = tuple(message for message in book.unsent.get(recipient, ()) if message not in gone)
    unsent = {**book.unsent, recipient: left}
    return replace(book, unsent={one: messages for one, messages in unsent.items() if messages})


def merged(messages: tuple[Message, ...]) -> Message:
    """Several messages as one, under the title of the worst."""
    worst = max(messages, key=lambda message: message.severity.rank)
    if len(messages) == 1:
        return worst
    body = "\n\n".join(f"{message.title}\n{message.body}" for message in messages)
    title = f"{worst.title}, and {len(messages) - 1} earlier or later"
    return Message(title, _cut(body, _BODY), worst.severity, messages[0].at_ms)


def _rested(book: Book, now_ms: int) -> Book:
    """Things whose quiet time is over: forgotten, or told as one. A clock that was stepped back prolongs nothing."""
    for key, quiet in book.quiet.items():
        if quiet.until_ms > now_ms:
            if quiet.until_ms > now_ms + QUIET_MS:
                book = _with(book, key, replace(quiet, until_ms=now_ms + QUIET_MS))
        elif quiet.more:
            again = Quiet(now_ms + QUIET_MS, quiet.last, over=quiet.last.over)
            more = "" if quiet.more == 1 else f" (and {quiet.more - 1} more like it)"
            book = _tell(book, replace(quiet.last, text=f"{quiet.last.text}{more}"), now_ms, again)
        else:
            book = replace(book, quiet={one: left for one, left in book.quiet.items() if one != key})
    return book


def _with(book: Book, key: str, quiet: Quiet) -> Book:
    return replace(book, quiet={**book.quiet, key: quiet})


def _tell(book: Book, notice: Notice, now_ms: int, quiet: Quiet) -> Book:
    book = _with(book, notice.key, quiet)
    if len(book.waiting) >= WAITING:
        return replace(book, beyond=book.beyond + 1)
    since_ms = book.since_ms if book.waiting else now_ms
    return replace(book, waiting=(*book.waiting, notice), since_ms=since_ms)


def _message_ms(book: Book, now_ms: int) -> int:
    """When those who wait are told: once the burst is over, and there is room in the hour."""
    recent = [ms for ms in book.sent_ms if now_ms - ms < HOUR_MS]
    free_ms = min(recent[-CAP], now_ms) + HOUR_MS if len(recent) >= CAP else 0
    return max(min(book.since_ms, now_ms) + BURST_MS, free_ms)


def _folded(notices: tuple[Notice, ...], beyond: int, now_ms: int) -> Message:
    worst = max(notices, key=lambda notice: notice.severity.rank)
    lines = list(dict.fromkeys(_line(notice, now_ms) for notice in notices))
    more = len(lines) - LINES + beyond if len(lines) > LINES else beyond
    if len(lines) == 1 and not more:
        return Message(worst.title, lines[0], worst.severity, worst.at_ms)
    shown = [f"- {line}" for line in lines[:LINES]] + ([f"- and {more} more (swapper events)"] if more else [])
    title = f"{worst.title}, and {len(lines) - 1 + beyond} more"
    return Message(title, _cut("\n".join(shown), _BODY), worst.severity, min(one.at_ms for one in notices))


def _line(notice: Notice, now_ms: int) -> str:
    if now_ms - notice.at_ms < LATE_MS:
        return _cut(notice.text, _TEXT)
    when = datetime.fromtimestamp(notice.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{_cut(notice.text, _TEXT)} ({when})"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
