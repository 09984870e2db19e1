"""The nouns of swapper as frozen values: card, tenant, lease, swap, and what surrounds them.

Invariant: nothing here does I/O, reads a clock or draws an id. Times are integer milliseconds since the epoch
(the store's clock), sizes are MiB unless a name says bytes, tokens are integers from the store's one counter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swapper.core.conversations import Conversation, Keeping
from swapper.core.errand import MANUAL, Errand
from swapper.core.orders import Command
from swapper.core.watched import Intruder, Need, Overrun


class LeaseState(StrEnum):
    """Life of a lease; see ACTIVE and FINAL for the two named sets."""

    QUEUED = "queued"
    PREPARING = "preparing"
    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"
    CANCELLED = "cancelled"
    FAILED = "failed"


ACTIVE = frozenset({LeaseState.QUEUED, LeaseState.PREPARING, LeaseState.GRANTED})
FINAL = frozenset(LeaseState) - ACTIVE


class WorkClass(StrEnum):
    """Class of a lease or a call, the most urgent first; see `rank`."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"
    MAINTENANCE = "maintenance"

    @property
    def rank(self) -> int:
        """0 is the most urgent. Maintenance comes last here: a window gets its time by `not_before`."""
        return _RANK[self]


_RANK = {klass: rank for rank, klass in enumerate(WorkClass)}


class Step(StrEnum):
    """One list for metrics, JSON and tables: the swap out, then the swap back (or into another tenant)."""

    CLOSE = "close"
    DRAIN = "drain"
    SAVE = "save"
    RELEASE = "release"
    VACATE = "vacate"
    LOAD = "load"
    RESTORE = "restore"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What a client asks for. `card` None means any card; `vram_mib` None means the whole card.

    `holder_started` (clock ticks since boot) tells the process `holder_pid` from a later one with its pid.
    """

    owner: str
    card: str | None = None
    vram_mib: int | None = None
    label: str = ""
    klass: WorkClass = WorkClass.NORMAL
    ttl_ms: int = 30_000
    max_hold_ms: int = 3_600_000
    expected_ms: int | None = None
    not_before_ms: int | None = None
    deadline_ms: int | None = None
    preemptible: bool = False
    holder_pid: int | None = None
    holder_started: int | None = None
    holder: str | None = None
    webhook: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A request for a card and what became of it.

    `seq` is the arrival order the store gave. `card` is the card asked for, or, once preparing, the card it got.
    `holder` is None for a plain HTTP lease, else `process:PID`, `job:ID`, `window:NAME` or a tenant id.
    `expires_ms` counts from the grant and moves with heartbeats; None while queued or preparing.
    """

    id: str
    request: LeaseRequest
    seq: int
    created_ms: int
    state: LeaseState = LeaseState.QUEUED
    card: str | None = None
    reason: str | None = None
    token: int | None = None
    granted_ms: int | None = None
    ended_ms: int | None = None
    expires_ms: int | None = None
    revoke_ms: int | None = None
    progress: float | None = None
    swap_id: str | None = None
    explain: str | None = None

    @property
    def whole(self) -> bool:
        """True when the lease excludes every tenant and holder beside it."""
        return self.request.vram_mib is None


class StepOutcome(StrEnum):
    """How one step of one tenant ended; `running` until then."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    FORCED = "forced"
    COMPENSATED = "compensated"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of a swap's table. `ms` is our wall time for the step, `backend_ms` what the server itself took."""

    step: Step
    tenant: str | None
    started_ms: int
    ms: int | None = None
    backend_ms: float | None = None
    outcome: StepOutcome = StepOutcome.RUNNING
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Swap:
    """A running or finished swap. `pending` are the commands not yet answered: re-sent as they are on resume.

    `stage` is the step in progress; `back` is True once it compensates (the tenants of `from_` come back).
    `next_n` numbers the next command; compensation continues the numbering. `forced_ms`: when calls were ended
    because the drain limit was reached. `retried`: commands (verb, tenant, snapshot) tried a second time. `told`: the
    gateways told to close; `idle`: those (executor, tenant) that had no call in flight then; `asked`: the gateways
    are drained and the servers were asked what they hold. `grants`: the end of this swap is the grant of `lease`, with
    the swap's own token; else `lease` only links the two swaps of a handover. `free_mib`: what its proof saw free.
    `drain_ms`: so long its calls in flight may take, where whoever asked for it said so. `force`: it goes on whatever
    is lost by that.
    """

    id: str
    card: str
    cause: str
    token: int
    from_: tuple[str, ...]
    to: tuple[str, ...]
    stage: Step
    started_ms: int
    stage_ms: int
    lease: str | None = None
    grants: bool = False
    next_n: int = 1
    pending: tuple[Command, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    conversations: tuple[Conversation, ...] = ()
    known: tuple[Conversation, ...] = ()
    tends: str | None = None
    back: bool = False
    forced_ms: int | None = None
    retried: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    asked: bool = False
    outcome: str | None = None
    reason: str | None = None
    ended_ms: int | None = None
    free_mib: int | None = None
    drain_ms: int | None = None
    force: bool = False

    @property
    def moves(self) -> bool:
        """False when nothing has to leave or come: only the proof that the VRAM is free."""
        return bool(self.from_ or self.to)

    @property
    def listed(self) -> bool:
        """Whether it is kept on record: it moves somebody, or did before it turned back, or is looked for by hand."""
        return self.moves or self.back or self.cause == MANUAL


@dataclass(frozen=True, slots=True)
class Hold:
    """A lease that prepares or holds (part of) a card. `vram_mib` None is the whole card.

    `pid` is the process it named, which started at `started` (clock ticks since boot; None: not known). `tenant` is the
    one that is on the card inside this lease, and only there.
    """

    lease: str
    label: str
    vram_mib: int | None
    pid: int | None
    granted: bool = False
    started: int | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Departed:
    """A holder that must be seen gone before the card is given on.

    `pid` is the process the lease named, `started` as a Hold has it; without one the card counts as free once
    `free_ms` has passed (at once after a release by the holder, after `policy.grace` once it expired or was revoked).
    """

    lease: str
    label: str
    pid: int | None
    free_ms: int
    started: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """The card is not given on: somebody keeps its VRAM. Left when a reading shows `need_mib` within reach.

    `count` failures in a row; nothing is brought back before `retry_ms`.
    """

    reason: str
    need_mib: int
    since_ms: int
    count: int = 1
    retry_ms: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A tenant that could not be loaded: why, how often in a row, and when it may be tried again.

    `crowded`: it ran out of memory, so that one resident more leaves for it than its need says.
    """

    reason: str
    count: int
    retry_ms: int
    crowded: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """A card's state. `version` is its compare-and-set; the store raises it by one at each commit.

    `residents` are tenant ids that serve here (their gate opens at the end of the swap that brings them).
    `return_to` are the residents it had before it left serving, None when there is nothing to go back to, and
    `return_lease` the lease that displaced them. `failed` names the tenants that could not be loaded. `ordered` is the
    newest (token, n) at an agent that changes what is seen: what was seen before it was carried out is old. `saved`:
    conversations of tenants that left, until these are loaded again. `keeping`: how each tenant's are kept.
    `save_after`: the moment before which a tenant's idle slots are not saved by the clock. `displaced`: conversations
    of residents that had to make room for others since the load, and are on disk. `intruders`: who is foreign on it and
    was told of. `overruns`: tenants over their need, or that something was done about. `needs`: what was measured.
    `unused`: who left because nobody used it, or by hand, and comes back only when it is asked for. `pinned`: who is
    sent away for nobody's calls, loads or leases, but by hand or for maintenance. `loads`: what each tenant's last load
    took, ms.
    """

    name: str
    version: int = 0
    residents: tuple[str, ...] = ()
    return_to: tuple[str, ...] | None = None
    return_lease: str | None = None
    holds: tuple[Hold, ...] = ()
    departed: tuple[Departed, ...] = ()
    swap: Swap | None = None
    fault: Fault | None = None
    failed: Mapping[str, Failure] = field(default_factory=dict[str, Failure])
    ordered: tuple[int, int] = (0, 0)
    saved: tuple[Conversation, ...] = ()
    keeping: Mapping[str, Keeping] = field(default_factory=dict[str, Keeping])
    save_after: Mapping[str, int] = field(default_factory=dict[str, int])
    displaced: tuple[Conversation, ...] = ()
    intruders: tuple[Intruder, ...] = ()
    overruns: Mapping[str, Overrun] = field(default_factory=dict[str, Overrun])
    needs: Mapping[str, Need] = field(default_factory=dict[str, Need])
    unused: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    loads: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def whole(self) -> Hold | None:
        """The whole lease that prepares or holds the card, if any."""
        return next((hold for hold in self.holds if hold.vram_mib is None), None)

    @property
    def phase(self) -> str:
        """`steady`, a step, `hold` or `fault` (also while a card at fault is being proved free again)."""
        if self.fault is not None and (self.swap is None or self.swap.stage is Step.VACATE):
            return "fault"
        if self.swap is not None:
            return self.swap.stage
        return "hold" if self.whole is not None else "steady"


@dataclass(frozen=True, slots=True)
class Gate:
    """May calls of a tenant be admitted? Every change raises the epoch; gateways obey the highest they saw."""

    epoch: int
    open: bool


@dataclass(frozen=True, slots=True)
class Demand:
    """Calls by model name at one gateway process, per model and class.

    `unsaved`: no calls, but the word that a conversation of the model stands in a slot, used since its last snapshot.
    `used`: no calls either, but the word that work was done since the last beat, and not only looked.
    """

    gateway: str
    tenant: str
    klass: WorkClass
    waiting: int
    running: int
    oldest_ms: int | None
    unsaved: bool = False
    used: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """What the store says at one moment (`now_ms` is the store's TIME), read in one call.

    `leases` holds every preparing and granted lease, the heads of the queue in (class rank, seq) order, and every
    lease whose expiry or deadline has passed. `gateways` are the live gateway processes, `next_due_ms` the earliest
    expiry or deadline still ahead. `token` is the one counter of tokens: the highest ever given out or reported.
    `stepped_ms`: how far the store's clock was stepped in all, as far as its records have followed (core/clock.py).
    `errands`: what was asked for by hand and is not over, in the order it came.
    """

    now_ms: int
    cards: Mapping[str, Card]
    leases: Mapping[str, Lease]
    queued: int = 0
    next_due_ms: int | None = None
    demand: tuple[Demand, ...] = ()
    gateways: tuple[str, ...] = ()
    gates: Mapping[str, Gate] = field(default_factory=dict[str, Gate])
    token: int = 0
    stepped_ms: int = 0
    errands: tuple[Errand, ...] = ()

    @property
    def next_token(self) -> int:
        """The token to give out next: higher than any before, and at least unix seconds << 20."""
        return max(self.token, self.now_ms // 1000 << 20) + 1
