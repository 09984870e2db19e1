"""What is known of one conversation, and how a request stands to it. Pure values.

Invariant: a conversation is named by the last link of its last request; links that are equal mean that everything up to
them is. Of what a manifest tells only the last links are known, not where in the chain they stand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from swapper.snapshots.chain import LINK_BYTES, Chain

MOST_LINKS = 2_000
"""How many links of a conversation are kept, the newest; the first one as well."""
TOLD_LINKS = 8
"""How many of them a talk, and with it a manifest, has."""
ATTACHED_LINKS = 8 * TOLD_LINKS
"""So many links back a snapshot on disk is known as an older state of a conversation."""


class Relation(StrEnum):
    """How a request stands to the known conversation that it shares most with."""

    NEW = "new"
    SAME = "same"
    EXTENDS = "extends"
    EDITED = "edited"
    """All but the last message is shared."""
    BRANCHED = "branched"
    """Less is, yet more than what the system says; of texts: a block or more."""


class Place(StrEnum):
    """Where a conversation is believed to be."""

    SERVER = "server"
    """In a slot or in the server's RAM cache."""
    DISK = "disk"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Request:
    """The last request of a conversation: what has to be sent for the server to read it again."""

    path: str
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Talk:
    """What a gateway tells of a conversation. `tokens` its last answer left in its slot, 0 unknown.

    `links`: its last ones, 32 hex characters each, oldest first, the last is `id`. `recallable`: its request is kept.
    `slot`: where it was last seen. `snapshot`: its newest one, which the next replaces, made beside its calls at
    `saved_ms` (0: it came back from it); `restored`: nothing was asked of it since.
    """

    id: str
    links: tuple[str, ...]
    tokens: int
    used_ms: int
    recallable: bool
    slot: int | None = None
    snapshot: str = ""
    restored: bool = False
    saved_ms: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot on disk that is in no slot, as an `open` tells of it; `id` is empty where no conversation is known."""

    snapshot: str
    id: str
    links: tuple[str, ...]
    tokens: int
    used_ms: int = 0


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a conversation in one piece; `first` is the number of the first one kept, None where unknown."""

    root: bytes
    packed: bytes = field(repr=False)
    first: int | None = 0

    @staticmethod
    def of(chain: Chain) -> Links:
        """What is kept of a chain."""
        first = max(len(chain.links) - MOST_LINKS, 0)
        return Links(chain.root, b"".join(chain.links[first:]), first)

    @staticmethod
    def told(links: Iterable[str]) -> Links | None:
        """The last links as a manifest has them; None when they are none."""
        try:
            pieces = [bytes.fromhex(link) for link in links]
        except ValueError:
            return None
        return Links(b"", b"".join(pieces), None) if pieces and {*map(len, pieces)} == {LINK_BYTES} else None

    def __len__(self) -> int:
        return len(self.packed) // LINK_BYTES

    def __getitem__(self, at: int) -> bytes:
        at += len(self) if at < 0 else 0
        return self.packed[at * LINK_BYTES : (at + 1) * LINK_BYTES]

    def shortened(self, count: int) -> Links:
        """The last links alone."""
        dropped = max(len(self) - count, 0)
        first = None if self.first is None else self.first + dropped
        return replace(self, packed=self.packed[dropped * LINK_BYTES :], first=first) if dropped else self

    def newest(self, count: int) -> tuple[bytes, ...]:
        """The last links, oldest first."""
        return tuple(self[at] for at in range(max(len(self) - count, 0), len(self)))


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat or text, as it stood after its last answer.

    Tokens, 0 where unknown: `prompt` of its last request, `cached` and `processed` of it, `tokens` left in the slot.
    `size`: bytes of that prompt. `restored`: it came back from disk and no answer has shown its use yet. `evicted`: so
    many tokens its last answer is said to have read again for an eviction, while it had stood in the slot `stood`.
    `passed`: another was answered in its slot since, or it was passed over as one that cannot be saved as it is.
    `origin`: its newest snapshot, the one it came back from or the one made at `saved_ms` (0: none was) while it stayed
    in the server; `saved`: nothing was asked of it since that. `as_prompt`: it stands, or was saved, as its last
    request's prompt and nothing more.
    """

    links: Links
    used_ms: int
    size: int = 0
    tokens: int = 0
    cached: int = 0
    processed: int = 0
    request: Request | None = None
    place: Place = Place.SERVER
    slot: int | None = None
    snapshot: str = ""
    reason: str = ""
    restored: bool = False
    origin: str = ""
    saved_ms: int = 0
    saved: bool = False
    as_prompt: bool = False
    evicted: int = 0
    stood: int | None = None
    passed: bool = False

    @property
    def id(self) -> str:
        """Its last link, in hex."""
        return self.links[-1].hex()

    @property
    def prompt(self) -> int:
        """Tokens of its last prompt; all that are saved of it, where only a manifest tells."""
        return self.cached + self.processed or self.tokens

    def went_on_from(self, ids: Collection[str]) -> bool:
        """Whether one of these is an older state of it, as far back as snapshots are found again."""
        return any(link.hex() in ids for link in self.links.newest(ATTACHED_LINKS)[:-1])

    def back_to(self, name: str) -> int:
        """So many links ago it had this name; more than are looked at where it never had, as far as is known."""
        newest = self.links.newest(ATTACHED_LINKS)
        return next((back for back, link in enumerate(reversed(newest)) if link.hex() == name), ATTACHED_LINKS)

    @property
    def unsaved(self) -> bool:
        """Whether it can be saved, as far as is known, and was used since its last snapshot."""
        there = self.place is Place.SERVER and not self.passed
        return there and self.tokens > 0 and not (self.restored or self.saved)

    def talk(self) -> Talk:
        """What is told of it."""
        links = tuple(link.hex() for link in self.links.newest(TOLD_LINKS))
        untouched, kept = self.restored or self.saved, self.request is not None
        return Talk(self.id, links, self.tokens, self.used_ms, kept, self.slot, self.origin, untouched, self.saved_ms)


@dataclass(frozen=True, slots=True)
class Match:
    """The known conversation that shares most with a request; `links` of it are shared (in a text, its end counts)."""

    relation: Relation
    conversation: Conversation | None = None
    links: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of the conversation is in the request."""
        return self.relation in (Relation.SAME, Relation.EXTENDS)

    @property
    def of_use(self) -> bool:
        """Whether the request can use most of what is saved of the conversation."""
        return self.whole or self.relation is Relation.EDITED

    @property
    def closeness(self) -> tuple[int, int, int, int]:
        """Of several the greatest counts: what shares most, then the nearest, then what was used last."""
        talk = self.conversation
        if talk is None:
            return 0, 0, 0, 0
        return self.links, _RANK[self.relation], _NEARNESS[talk.place], talk.used_ms


NEW = Match(Relation.NEW)
_RANK = {Relation.SAME: 3, Relation.EXTENDS: 3, Relation.EDITED: 2, Relation.BRANCHED: 1, Relation.NEW: 0}
_NEARNESS = {Place.SERVER: 2, Place.DISK: 1, Place.COLD: 0}


class Sought:
    """A request's chain while it is compared with many conversations: what takes long is made once, when needed."""

    __slots__ = ("_ends", "_places", "chain")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._places: dict[bytes, int] | None = None
        self._ends: dict[int, frozenset[bytes]] = {}

    @property
    def places(self) -> Mapping[bytes, int]:
        """Where in the chain each link stands."""
        if self._places is None:
            self._places = {link: at for at, link in enumerate(self.chain.links)}
        return self._places

    def ends(self, block: int) -> frozenset[bytes]:
        """See `Chain.ends`."""
        if block not in self._ends:
            self._ends[block] = self.chain.ends(block)
        return self._ends[block]

    def goes_on(self, known: Conversation, shared: int) -> bool:
        """Whether a text whose last block alone is not shared ends within the next block of this one."""
        if known.links.first is None:  # a manifest does not tell how long its text was
            return known.links[-1] in self.ends(shared)
        return known.size > 0 and known.links[-1] == self.chain.end_at(known.size)


def compare(known: Conversation, sought: Sought) -> Match:
    """How the request that is sought stands to a known conversation."""
    links, chain = known.links, sought.chain
    if links.first is None:
        shared, length = _by_places(links, sought.places)
    else:
        shared, length = _depth(links, links.first, chain), links.first + len(links)
    if shared == length:
        return Match(Relation.SAME if shared == len(chain.links) else Relation.EXTENDS, known, shared)
    if chain.text is not None and shared == length - 1 and sought.goes_on(known, shared):
        return Match(Relation.EXTENDS, known, length)
    if shared <= 0:
        return NEW
    edited = shared == length - 1 and not chain.is_text
    return Match(Relation.EDITED if edited else Relation.BRANCHED, known, shared)


def _by_places(links: Links, places: Mapping[bytes, int]) -> tuple[int, int]:
    """How many links are shared, and how many the conversation has, as far as the newest shared link tells."""
    for back in range(len(links)):
        if (at := places.get(links[-1 - back])) is not None:
            return at + 1, at + 1 + back
    return (0, 1) if len(links) == 1 else (-1, len(links))


def _depth(links: Links, first: int, chain: Chain) -> int:
    """How many links are shared: equal up to some point, different from there on, so that halving finds it."""
    low, high = first, min(first + len(links), len(chain.links))
    if low >= high or links[0] != chain.links[low]:
        return 1 if first and links.root == chain.links[0] else 0
    packed, theirs = links.packed, chain.links
    while high - low > 1:
        middle = (low + high) // 2
        at = (middle - first) * LINK_BYTES
        if packed[at : at + LINK_BYTES] == theirs[middle]:
            low = middle
        else:
            high = middle
    return low + 1
