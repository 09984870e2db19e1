"""What clients saw of the lease API, and whether one honest swapper could have said it; judged afterwards.

Invariant: the judge knows nothing but what was asked and answered, when, and what is stored in the end. An answer that
did not come (`unknown`) may have been obeyed or not; everything else must fit together. Each rule is a function from
the history to sentences, none of them where all is well. Times are seconds of one clock, that of the `expires_at`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import cast

Json = Mapping[str, object]
FINAL = frozenset({"released", "expired", "revoked", "cancelled", "failed"})
UNTOLD = frozenset({"position", "explain", "eta_s", "env", "expires_at", "progress"})
"""Of a lease: what is said with an answer or moved by heartbeats, and so is in no event."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `verb`: create, look, heartbeat, release or cancel. `outcome`: ok, refused or unknown.

    `key` is the Idempotency-Key and label of the lease it is about, `answer` the lease as it was answered (ok only).
    """

    client: int
    verb: str
    key: str
    invoked: float
    returned: float
    outcome: str
    answer: Json | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event log as `/api/events` tells it."""

    type: str
    image: Json

    @property
    def subject(self) -> tuple[str, str]:
        """What it is about."""
        return self.type, str(self.image["id"])


@dataclass(frozen=True, slots=True)
class Believed:
    """A client knows that it holds the card: from an answer on until it lets go or the time it was told is over."""

    key: str
    since: float
    until: float


def seconds(moment: object) -> float:
    """An RFC 3339 time as seconds since the epoch."""
    return datetime.fromisoformat(str(moment)).timestamp()


def judge(calls: Sequence[Call], leases: Sequence[Json], events: Sequence[Event], stored: Iterable[Event]) -> list[str]:
    """Every rule. `leases` are all there are in the end; `stored` what the API answers then, in the form of events."""
    return [
        *overlaps(calls),
        *tokens_fall(calls, leases),
        *creates_lost_or_doubled(calls, leases),
        *ends_undone(calls, leases),
        *without_an_end(leases, events),
        *log_differs(events, stored),
    ]


def overlaps(calls: Iterable[Call]) -> list[str]:
    """No two clients may believe at the same time that they hold the whole card."""
    held = sorted(believed(calls), key=lambda b: b.since)
    found: set[tuple[str, str]] = set()
    latest: Believed | None = None
    for one in held:
        if latest is not None and latest.key != one.key and one.since < latest.until:
            found.add((latest.key, one.key))
        if latest is None or one.until > latest.until:
            latest = one
    return [f"{a} and {b} were believed held at the same time" for a, b in sorted(found)]


def believed(calls: Iterable[Call]) -> list[Believed]:
    """One piece for each answer that says granted, with the end that it tells."""
    of: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        of[call.key].append(call)
    pieces: list[Believed] = []
    for key, mine in of.items():
        let_go = min(
            [c.invoked for c in mine if c.verb == "release"]
            + [c.returned for c in mine if c.answer is not None and c.answer["state"] in FINAL],
            default=float("inf"),
        )
        granted = [c for c in mine if c.answer is not None and c.answer["state"] == "granted"]
        ends = [(c.returned, min(let_go, seconds(c.answer["expires_at"]))) for c in granted if c.answer is not None]
        pieces += [Believed(key, since, until) for since, until in ends if since < until]
    return pieces


def tokens_fall(calls: Iterable[Call], leases: Iterable[Json]) -> list[str]:
    """Tokens rise in the order of grants, as the store dates them and as the clients see them."""
    granted = sorted(
        (cast("str", x["granted_at"]), cast("int", x["token"]), str(x["id"])) for x in leases if x["token"]
    )
    falls = [
        f"{later[2]} was granted after {earlier[2]}, with the token {later[1]} after {earlier[1]}"
        for earlier, later in pairwise(granted)
        if later[1] <= earlier[1]
    ]
    tokens: defaultdict[str, set[int]] = defaultdict(set)
    first_seen: dict[str, float] = {}
    asked: dict[str, float] = {}
    for call in calls:
        asked[call.key] = min(call.invoked, asked.get(call.key, call.invoked))
        if call.answer is not None and call.answer["token"] is not None:
            tokens[call.key].add(cast("int", call.answer["token"]))
            first_seen[call.key] = min(call.returned, first_seen.get(call.key, call.returned))
    falls += [f"{key} was told several tokens: {sorted(told)}" for key, told in tokens.items() if len(told) > 1]
    highest, by_seen = 0, sorted(first_seen, key=lambda key: first_seen[key])
    for key in sorted(first_seen, key=lambda key: asked[key]):
        while by_seen and first_seen[by_seen[0]] < asked[key]:
            highest = max(highest, *tokens[by_seen.pop(0)])
        if min(tokens[key]) <= highest:
            falls.append(f"{key} was asked for after {highest} was known, and got {min(tokens[key])}")
    return falls


def creates_lost_or_doubled(calls: Iterable[Call], leases: Iterable[Json]) -> list[str]:
    """Who was told of a lease has it, the same at each repetition; nobody has two, nobody what he never asked for."""
    there = Counter(str(lease["label"]) for lease in leases)
    ids = {str(lease["id"]) for lease in leases}
    asked: set[str] = set()
    told: defaultdict[str, set[str]] = defaultdict(set)
    for call in calls:
        if call.verb == "create":
            asked.add(call.key)
        if call.answer is not None:
            told[call.key].add(str(call.answer["id"]))
    return [
        *(f"{key} was told several leases: {sorted(names)}" for key, names in told.items() if len(names) > 1),
        *(f"{key} was told {name}, which is not there" for key, names in told.items() for name in names - ids),
        *(f"{key} has {count} leases" for key, count in there.items() if count > 1),
        *(f"{key} has a lease, and never asked" for key in there if key not in asked),
    ]


def ends_undone(calls: Iterable[Call], leases: Iterable[Json]) -> list[str]:
    """What was once said to have ended stays as it ended; a release that was answered is an end."""
    states = {str(lease["label"]): lease["state"] for lease in leases}
    told: dict[str, tuple[float, object]] = {}
    found: list[str] = []
    for call in sorted(calls, key=lambda call: call.returned):
        state = None if call.answer is None else call.answer["state"]
        if state is None:
            continue
        if call.verb in ("release", "cancel") and state not in FINAL:
            found.append(f"the {call.verb} of {call.key} was answered with {state}")
        when, before = told.get(call.key, (call.returned, state))
        if state != before and call.invoked >= when:
            found.append(f"{call.key} was {before}, and {state} afterwards")
        if state in FINAL:
            told.setdefault(call.key, (call.returned, state))
    found += [
        f"{key} was said to be {state}, and is {states.get(key)}"
        for key, (_, state) in told.items()
        if states.get(key) != state
    ]
    return found


def without_an_end(leases: Iterable[Json], events: Iterable[Event]) -> list[str]:
    """In the end every lease has ended, once, and with a reason."""
    ends: defaultdict[str, list[object]] = defaultdict(list)
    for event in events:
        if event.type == "lease" and event.image["state"] in FINAL:
            ends[str(event.image["id"])].append(event.image["state"])
    mine = list(leases)
    return [
        *(f"{lease['label']} is {lease['state']} in the end" for lease in mine if lease["state"] not in FINAL),
        *(f"{lease['label']} is {lease['state']} without a reason" for lease in mine if not lease["reason"]),
        *(f"{name} ended more than once: {states}" for name, states in ends.items() if len(states) > 1),
    ]


def log_differs(events: Sequence[Event], stored: Iterable[Event]) -> list[str]:
    """The newest image of each thing is what is stored, and of a thing's images none is missing in between."""
    folded = {event.subject: event.image for event in events}
    versions: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for event in events:
        if event.type in ("lease", "swap", "card"):
            versions[event.subject].append(cast("int", event.image["version"]))
    found = [
        f"{' '.join(subject)}: version {later} follows {earlier}"
        for subject, numbers in versions.items()
        for earlier, later in pairwise(numbers)
        if later != earlier + 1
    ]
    for one in stored:
        image = folded.get(one.subject)
        if image is None:
            continue  # the log is trimmed: it no longer reaches back to the last change
        found += [
            f"{' '.join(one.subject)}: {name} is {one.image[name]!r}, {image[name]!r} by the log"
            for name in sorted(one.image.keys() & image.keys() - UNTOLD)
            if one.image[name] != image[name]
        ]
    return found
