"""Tokens that were read though they had been read before: how many, and why. Pure.

Invariant: nothing is called read before but what a known conversation's own figures cover; of a part of it, by its
share of the bytes. What cannot have been avoided, the last token and a template's end, is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from swapper.snapshots.chain import Chain
from swapper.snapshots.conversation import Conversation, Match, Place, Relation

SLACK_TOKENS = 32
"""So many are read again for no fault: the last token always, the end of the template where the next turn goes on."""
ADVISE_TOKENS, ADVISE_SHARE = 1_000, 0.1
"""From so many tokens, and from such a share of all prompt tokens, on there is something to say."""


class Why(StrEnum):
    """Why tokens were read again."""

    SWAPPED = "swapped cold"
    EVICTED = "evicted from the RAM cache"
    EDITED = "edited history"
    SLOT = "other slot"
    CHECKPOINT = "reused up to a checkpoint only"
    """At least half was reused: it was there, and the model can go back to some places only."""


@dataclass(frozen=True, slots=True)
class Account:
    """The prompt tokens of one answer. `reread` of the `processed` ones had been read before, which `why` explains."""

    relation: Relation
    cached: int
    processed: int
    reread: int = 0
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """The sum of the accounts of one tenant, tokens."""

    cached: int = 0
    processed: int = 0
    reread: Mapping[Why, int] = field(default_factory=dict[Why, int])

    def plus(self, account: Account) -> Counts:
        """With one more account."""
        reread = self.reread
        if account.why is not None:
            reread = {**reread, account.why: reread.get(account.why, 0) + account.reread}
        cached, processed = self.cached + account.cached, self.processed + account.processed
        return Counts(cached, processed, reread)

    def found_in_another_slot(self, tokens: int) -> Counts:
        """With so many tokens that were said to be evicted and stood in another slot."""
        evicted, slot = self.reread.get(Why.EVICTED, 0) - tokens, self.reread.get(Why.SLOT, 0) + tokens
        return replace(self, reread={**self.reread, Why.EVICTED: evicted, Why.SLOT: slot})


def read_before(match: Match, chain: Chain) -> int:
    """How many tokens of the request were read before: an estimate; 0 where a manifest does not tell enough for one."""
    known = match.conversation
    if known is None:
        return 0
    if match.whole:
        return known.prompt
    return known.prompt * min(chain.sizes[match.links - 1], known.size) // known.size if known.size else 0


def account(match: Match, before: int, cache_n: int, prompt_n: int, slot: int | None) -> Account:
    """What an answer with these figures cost, given what was known and how much of it had been read before."""
    plain, known = Account(match.relation, cache_n, prompt_n), match.conversation
    before = min(before, cache_n + prompt_n)
    if known is None or before - cache_n <= SLACK_TOKENS:
        return plain
    return replace(plain, reread=before - cache_n, why=_why(match, known, before, cache_n, slot))


def _why(match: Match, known: Conversation, before: int, cache_n: int, slot: int | None) -> Why:
    if known.place is not Place.SERVER or known.restored:
        return Why.SWAPPED
    if not match.whole:
        return Why.EDITED
    if 2 * cache_n >= before:
        return Why.CHECKPOINT
    if slot is not None and known.slot is not None and slot != known.slot:
        return Why.SLOT
    return Why.EVICTED


def advise(counts: Counts, n_slots: int | None) -> str | None:
    """What would spare re-reads, in a sentence; None while they are few."""
    evicted, other = counts.reread.get(Why.EVICTED, 0), counts.reread.get(Why.SLOT, 0)
    total, wasted = counts.cached + counts.processed, evicted + other
    if wasted < ADVISE_TOKENS or wasted < ADVISE_SHARE * total:
        return None
    parallel = "parallel" if n_slots is None else f"parallel (now {n_slots})"
    said = f"{wasted:,} of {total:,} prompt tokens ({wasted / total:.0%}) were read a second time because "
    if evicted >= other:
        return f"{said}the conversation was no longer in the server's RAM cache: raise --cache-ram, or {parallel}"
    return f"{said}the conversation stood in another slot: raise {parallel}, or --cache-ram"
