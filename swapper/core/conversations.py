"""Conversations as a swap sees them, and what is known of how a tenant's are kept. Frozen values, no I/O.

A conversation is one chat's message chain. It is known by its `head`, the newest link of its digest chain, where a
gateway saw its requests; else only by the slot it lay in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

WORTH_TOKENS = 128
"""A shorter conversation is read faster than it is brought back from disk, or recalled to be saved."""


class ProofResult(StrEnum):
    """What is known of a restored conversation: nothing yet, reuse was seen, or it was read again."""

    UNPROVED = "unproved"
    WARM = "warm"
    COLD = "cold"


class Strategy(StrEnum):
    """How a model's conversations are kept.

    `slots`: its slots are saved as they are. `rewind`: each is first taken back to the end of its last request, because
    the model goes on only from exactly what was saved (hybrid and recurrent models). `replay`: nothing is saved, the
    last request is read again after the load, before anybody asks. `off`: they are not kept.
    """

    SLOTS = "slots"
    REWIND = "rewind"
    REPLAY = "replay"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation in one swap: what was saved of it and what came back.

    `snapshot` is the file name inside the tenant's slot folder; `tokens` and `bytes` are the server's own figures.
    `slot` is where it lies now (the saved slot in a swap out, the restored one in a swap back), -1 where that is not
    known. `head` and `links` (the last of its chain, oldest first) as the gateway said them, `used_ms` its last use,
    `gateway` the executor that has its last request, None where nobody has. `recall`: that request is to be sent again
    before the save. `replaces`: its newest snapshot so far, `saved_ms` when that was made beside its calls (0: it was
    not). `kept`: it stays on disk until it is asked for.
    """

    tenant: str
    slot: int
    snapshot: str
    tokens: int
    bytes: int
    strategy: str = "slots"
    saved: bool = False
    restored: bool = False
    result: ProofResult | None = None
    cache_n: int | None = None
    reason: str | None = None
    head: str = ""
    links: tuple[str, ...] = ()
    used_ms: int = 0
    gateway: str | None = None
    recall: bool = False
    replaces: str | None = None
    saved_ms: int = 0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """What its server was measured to take for a model, in ms for 1,000 tokens.

    `read`: to read a prompt; `keep`: to save a conversation and to restore it.
    """

    read: float
    keep: float

    @property
    def words(self) -> str | None:
        """Said where a conversation is read sooner than saved and restored."""
        if self.keep <= self.read:
            return None
        times = f"saving and restoring 1,000 tokens takes {self.keep:,.0f} ms, reading them {self.read:,.0f} ms"
        return f"{times}: where that is felt, conversations are read again instead of saved"


@dataclass(frozen=True, slots=True)
class Keeping:
    """How one tenant's conversations are kept, as its agent said last.

    `strategies` are those that suit the model, the best first; none: they cannot be kept. `fingerprint` stands for
    model, build and preset: what was seen to fail counts for that one only. `demoted`: strategy -> what was seen.
    `proved`: those that a conversation came back warm by; `doubts`: strategy -> how many were read anew, of one not
    proved. `costs`: None until enough was measured. `n_slots`: as its last load said, 0 not known.
    """

    strategies: tuple[str, ...] = (Strategy.SLOTS,)
    fingerprint: str = ""
    demoted: Mapping[str, str] = field(default_factory=dict[str, str])
    proved: tuple[str, ...] = ()
    doubts: Mapping[str, int] = field(default_factory=dict[str, int])
    costs: Costs | None = None
    n_slots: int = 0

    @property
    def strategy(self) -> Strategy:
        """The one in use: the best that was not seen to fail."""
        return next((Strategy(s) for s in self.strategies if s not in self.demoted), Strategy.OFF)
