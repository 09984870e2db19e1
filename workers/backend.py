"""The seam between the agent and everything that can live on a card: one Backend per configured server.

Invariant: a verb returns only what was observed, never what an answer claimed; it is safe to call twice. Verbs raise
BackendError (see swapper/errors.py) with a sentence a person can act on; where we own the server's log, its last
lines are in it. A backend knows its server and its files, and nothing of policy, leases or the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from swapper.core.conversations import Costs


class TenantState(StrEnum):
    """What `observe` saw.

    `stopped`: no server is there and none of its model processes lives. `unreachable`: a server (or a process it left
    behind) is there and does not answer, so nothing is known, and whatever it had must be counted as still there.
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    FAILED = "failed"
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"

    @property
    def holds_vram(self) -> bool:
        """True where the tenant must be counted as holding its VRAM (loading, loaded, sleeping, unreachable)."""
        return self in _HOLDING


_HOLDING = frozenset({TenantState.LOADING, TenantState.LOADED, TenantState.SLEEPING, TenantState.UNREACHABLE})


@dataclass(frozen=True, slots=True)
class SlotUse:
    """One slot that holds something: `tokens` in it now (0 where the server does not say, right after a restore).

    `gone_on`: something ran there after a conversation had come into it from disk.
    """

    slot: int
    tokens: int
    gone_on: bool = False


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation as a gateway knows it, without a word of it.

    `id` is the link of its last request, `links` the last ones of its chain (the oldest first, the last one is `id`),
    `tokens` what its last answer left in its slot (0: not known), `used_ms` when that was, in ms since the epoch.
    `slot` is where it was seen to be, None where nobody saw it. `snapshot` is its newest one so far, "" where it has
    none.
    """

    id: str
    links: tuple[str, ...] = ()
    tokens: int = 0
    used_ms: int = 0
    slot: int | None = None
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The server is idle. `slots` are those that may hold a conversation; empty for kinds without slots.

    `gone`: the tenant is not loaded any more, and whatever its slots held went with it. `strategies` are the ways to
    keep its conversations, the best first (none: nothing is kept); `fingerprint` is a short digest of what decides
    whether saved state means the same (model, build, settings), "" where that could not be learnt. `costs`: None while
    too little was measured.
    """

    slots: tuple[SlotUse, ...] = ()
    gone: bool = False
    strategies: tuple[str, ...] = ()
    fingerprint: str = ""
    costs: Costs | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A slot is on disk under `snapshot`, manifest written. `tokens` 0: the slot was empty and no file was kept."""

    snapshot: str
    slot: int
    tokens: int
    bytes: int
    backend_ms: float


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot that could be restored now (`refused` None), or why it must not be.

    `id` and `links` as in `Talk`, "" and none where nobody knew them at the save; `used_ms` 0: not known.
    """

    snapshot: str
    slot: int
    tokens: int
    bytes: int
    saved_ms: int
    strategy: str = "slots"
    refused: str | None = None
    id: str = ""
    links: tuple[str, ...] = ()
    used_ms: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tenant answers. `snapshots`: the last used first, the refused ones with their reason.

    `strategies` and `fingerprint` as in `Quiesced`. `n_ctx_shared`: tokens that all slots hold together, where they
    share them (kv-unified); None where each has its own `n_ctx_slot`.
    """

    n_slots: int = 0
    n_ctx_slot: int = 0
    n_ctx_shared: int | None = None
    snapshots: tuple[SnapshotInfo, ...] = ()
    backend_ms: float | None = None
    strategies: tuple[str, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Displaced:
    """What made room for a restore, on disk now. `id`, `links`, `used_ms` as in `Talk`, "" and none: nobody knows."""

    snapshot: str
    tokens: int
    bytes: int
    id: str = ""
    links: tuple[str, ...] = ()
    used_ms: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    """The server says so many tokens are back in the slot. Reuse is not proved by this."""

    slot: int
    tokens: int
    backend_ms: float
    displaced: Displaced | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A process that holds VRAM of a card. `mib` None: its driver does not tell how much.

    `line` is (pid, start in clock ticks since boot) of the process itself, its parent, and so on up; empty, as is
    `name`, where the process cannot be seen from here. `containers` are the ids of those it runs in, the outermost
    first. `owner` is whom `Owners` names for it, None: nobody, and whether a lease is behind it is told by `line`.
    """

    pid: int
    mib: int | None
    name: str | None = None
    line: tuple[tuple[int, int], ...] = ()
    containers: tuple[str, ...] = ()
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose a process is: that of the nearest of it and its parents whose pid is here, else of its container.

    `containers` go by id (at least 12 of its digits). The values are ids of tenants, or names of servers.
    """

    pids: Mapping[int, str] = field(default_factory=dict[int, str])
    containers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Reading:
    """A card as its probe sees it, MiB. `holders` name who holds VRAM, for people; `held` are the processes.

    `reserved_mib` is what the driver keeps for itself, in neither `used_mib` nor `free_mib`. `pool`: which memory this
    is: vram, gtt (host memory an AMD GPU maps), host, or declared (nothing was measured). `env` are the variables by
    which a process sees this card only. `note`: one sentence on what the probe cannot tell.
    """

    total_mib: int
    used_mib: int
    free_mib: int
    holders: tuple[str, ...] = ()
    reserved_mib: int = 0
    held: tuple[Held, ...] = ()
    pool: str = "declared"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Unread:
    """The card's memory could not be read, so nothing of it counts as free: why, and what to do, in one sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class SaveArgs:
    """Which slot, under which fresh file name; what is in it, where somebody knows, and how it came there.

    `strategy` is what the slot was made ready by (slots: nothing was done to it); `token` is the swap's. `replaces`:
    the snapshot that the named conversation came back from. `holds` (None: the gate is shut): so many tokens
    must be in the slot, nothing being at work in the model, else nothing is kept and BackendBusy is raised.
    """

    slot: int
    name: str
    talk: Talk | None = None
    strategy: str = "slots"
    token: int = 0
    replaces: str | None = None
    holds: int | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """How room is made for a restore: what leaves is saved under the fresh `name`, as a save of the swap `token`.

    `talks` are the conversations believed to be in the server: the one that alone can be what the slot holds is it.
    `tells`: before something leaves that was used since it came, that is told (`WouldPushOut`), and nothing done.
    `takes`: what was told and may leave now, if it is as it was then; `strategy` is what it was made ready by.
    """

    name: str
    talks: tuple[Talk, ...] = ()
    token: int = 0
    tells: bool = False
    takes: SlotUse | None = None
    strategy: str = "slots"


class WouldPushOut(Exception):
    """A restore was not begun: it would take this slot. `id`: whose conversation lies there, "" where nobody knows."""

    def __init__(self, use: SlotUse, id_: str = "") -> None:
        super().__init__(f"slot {use.slot} with {use.tokens} tokens would have to make room")
        self.use = use
        self.id = id_


class SaveUnsupported(Exception):
    """The server cannot save slots at all (HTTP 501): strategy `off`, not a failure."""


class Backend(Protocol):
    """The verbs on the tenants of one server. `tenant` is a full id such as `llama/med`."""

    async def start(self) -> None:
        """Make sure the server process runs (control `command`: adopt or start it; `attach`: nothing)."""
        ...

    async def observe(self) -> Mapping[str, TenantState]:
        """State of every tenant of this server, without waking or loading anything. Never raises.

        Tenants that hold VRAM and are not configured are among them, as `SERVER/model`.
        """
        ...

    async def quiesce(self, tenant: str, *, limit_ms: int | None = None) -> Quiesced:
        """Wait until the server's own counters show nothing running and nothing deferred for the tenant.

        No answer of a tenant that is still loaded is no end. After `limit_ms` (None: never) a BackendError says what
        still runs.
        """
        ...

    async def save(self, tenant: str, args: SaveArgs) -> Saved:
        """Save one slot; raises SaveUnsupported, or BackendError when it failed (nothing was lost in the slot)."""
        ...

    async def release(self, tenant: str, *, limit_ms: int) -> str | None:
        """Unload or stop; returns when the process that held the VRAM is gone, with a sentence where one is due."""
        ...

    async def load(self, tenant: str) -> Loaded:
        """Load or start; returns when the tenant answered its smallest real call."""
        ...

    async def restore(self, tenant: str, snapshot: str, slot: int, room: Room | None = None) -> Restored:
        """Put a snapshot into a slot, after size, digest and fingerprint were checked; that slot must be empty.

        `slot` -1: an empty idle one, else the idle one unused for longest, which is saved first as `room` says (None:
        only an empty one will do). Whatever is being spoken to is never taken. Raises WouldPushOut where the room says
        so.
        """
        ...

    async def end_hung(self) -> str | None:
        """End what is ours, lives, and by the looks so far has shown no sign of life for too long; a sentence if so."""
        ...

    def fenced(self, fence: Callable[[], Awaitable[None]]) -> None:
        """From now on `fence` is awaited right before each request that changes anything (`claim.Fence`)."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields whenever the server said that something changed (then `observe` is worth calling)."""
        ...

    async def close(self) -> None:
        """Drop connections; the server and its tenants stay as they are."""
        ...


@runtime_checkable
class Processes(Protocol):
    """A backend that knows which processes are its tenants'."""

    def processes(self) -> Owners:
        """Those that live now, as last seen; a look at them costs nothing. Never raises."""
        ...


@runtime_checkable
class Sized(Protocol):
    """A backend whose server tells how many tokens a call may have."""

    def contexts(self) -> Mapping[str, Mapping[str, int]]:
        """By tenant and model as the server calls it, as last told; a look costs nothing. Never raises."""
        ...


@runtime_checkable
class Sensing(Protocol):
    """A backend whose server tells what its models take: `text`, `image`, `audio`."""

    def inputs(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """By tenant and model as the server calls it, as last told; a look costs nothing. Never raises."""
        ...


@runtime_checkable
class Filed(Protocol):
    """A backend that knows the files its tenants load."""

    async def files(self, tenant: str) -> tuple[Path, ...]:
        """As this host sees them, also while it is not loaded; none where they are not known. Never raises."""
        ...


class Probe(Protocol):
    """Reads one card's VRAM."""

    async def read(
        self, states: Mapping[str, TenantState], holder_pids: tuple[int, ...], owners: Owners
    ) -> Reading | Unread:
        """`states` are the card's tenants as observed; `holder_pids` lease holders that may still be alive.

        Never raises for what a driver or a file does, and answers in bounded time, whatever hangs.
        """
        ...
