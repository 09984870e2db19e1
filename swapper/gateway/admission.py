"""Which calls may run now: gates, calls in flight and waiting calls of one gateway process, all in memory.

Invariant: a call runs only while its tenant's gate is open at the highest epoch seen, this process's membership is
fresh, and the tenant's concurrency allows it; a call is waiting, running or gone, never two of them. No HTTP, no store
and no awaiting on the way in: the clock (monotonic, integer ms) is given, `on_change` tells when demand appears or
goes, and `on_shut` which tenant's gate was shut.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from swapper.core.types import Demand, Gate, WorkClass
from swapper.gateway.turns import CallState, Cut, Full, Turn


class Call:
    """One call by model name, from its arrival to its end. Made by `Admission.admit` only.

    `waited_ms` is the time spent waiting so far, `swap` the swap that ended its last wait, `error` why it failed,
    `cut_reason` why it was cut. `on_cut` is called (once per cut) while it runs. `looks`: it is no work of the model.
    """

    __slots__ = (
        "_admission",
        "_since_ms",
        "_woken",
        "cut_reason",
        "error",
        "klass",
        "looks",
        "max_wait_ms",
        "on_cut",
        "owner",
        "seq",
        "started",
        "state",
        "swap",
        "tenant",
        "waited_ms",
    )

    def __init__(
        self, admission: Admission, tenant: str, klass: WorkClass, owner: str, seq: int, max_wait_ms: int
    ) -> None:
        self._admission = admission
        self._since_ms = 0
        self._woken: asyncio.Event | None = None
        self.tenant = tenant
        self.klass = klass
        self.owner = owner
        self.seq = seq
        self.max_wait_ms = max_wait_ms
        self.looks = False
        self.state = CallState.WAITING
        self.started = False
        self.swap: str | None = None
        self.error: str | None = None
        self.cut_reason: str | None = None
        self.on_cut: Callable[[], None] | None = None
        self.waited_ms = 0

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the queue: class rank, then arrival. A call that waits again keeps its arrival."""
        return (self.klass.rank, self.seq)

    @property
    def since_ms(self) -> int:
        """When its present wait began, monotonic ms."""
        return self._since_ms

    async def turn(self) -> Turn:
        """Wait until it may run, it failed, or it has waited `max_wait_ms` in all. Leaving is `finish`."""
        while self.state in (CallState.WAITING, CallState.PARKED):
            left_ms = self.max_wait_ms - self.waited_ms - (self._admission.now() - self._since_ms)
            if left_ms <= 0:
                return Turn.TIMED_OUT
            self._woken = asyncio.Event()
            try:
                async with asyncio.timeout(left_ms / 1000):
                    await self._woken.wait()
            except TimeoutError:
                continue
        return Turn.RUN if self.state is CallState.RUNNING else Turn.FAILED

    def first_byte(self) -> None:
        """A byte of the answer goes to the client: from now on the call cannot be sent again."""
        self.started = True

    def requeue(self, *, parked: bool = False) -> None:
        """Wait again, in the old place. The upstream socket is closed by now. Only for a call with no byte sent."""
        self._admission.requeue(self, parked=parked)

    def unpark(self) -> None:
        """End the pause of a parked call."""
        self._admission.unpark(self)

    def finish(self) -> None:
        """The call is over, whatever it was doing: nothing of it waits or is in flight any more. Safe to repeat."""
        self._admission.finish(self)

    def begin(self, now_ms: int) -> None:
        """Enter the queue (Admission's business)."""
        self._since_ms = now_ms

    def wake(self, state: CallState, now_ms: int) -> None:
        """Leave the queue into `state` (Admission's business)."""
        self.waited_ms += now_ms - self._since_ms
        self.state = state
        if self._woken is not None:
            self._woken.set()


class _Tenant:
    """What this process knows of one tenant: its gate, who runs and who waits."""

    __slots__ = ("drained", "gate", "limit", "running", "swap", "waiting")

    def __init__(self, limit: int | None) -> None:
        self.gate = Gate(epoch=0, open=False)
        self.swap: str | None = None
        self.limit = limit
        self.running: set[Call] = set()
        self.waiting: list[tuple[tuple[int, int], Call]] = []
        self.drained: list[asyncio.Event] = []

    def has_room(self) -> bool:
        return self.limit is None or len(self.running) < self.limit

    def index(self, call: Call) -> int:
        return bisect_left(self.waiting, call.key, key=_place)

    def alone_in_class(self, call: Call) -> bool:
        """True when no other call of its class waits: the queue is sorted, so its neighbours tell."""
        at = self.index(call)
        beside = (*self.waiting[max(at - 1, 0) : at], *self.waiting[at + 1 : at + 2])
        return all(other.klass is not call.klass for _, other in beside)


class Admission:
    """The gates of one gateway process. `gateway` is its id, `clock` gives monotonic ms.

    `epoch_offset_ms` + clock = the store's time; the member shell keeps it right (demand records carry store time).
    """

    def __init__(
        self,
        gateway: str,
        *,
        clock: Callable[[], int],
        max_waiting: int = 10_000,
        concurrency: Mapping[str, int] | None = None,
    ) -> None:
        self.gateway = gateway
        self.now = clock
        self.max_waiting = max_waiting
        self.concurrency: Mapping[str, int] = concurrency or {}
        self.epoch_offset_ms = 0
        self.on_change: Callable[[], None] = lambda: None
        self.on_shut: Callable[[str], None] = lambda _: None
        self.worked: set[str] = set()
        self._fresh_until_ms = -1
        self._tenants: dict[str, _Tenant] = {}
        self._seq = 0
        self._waiting = 0

    # ---- calls

    def admit(self, tenant: str, klass: WorkClass, owner: str, max_wait_ms: int, *, looks: bool = False) -> Call | Full:
        """Take a call: it runs at once (state `running`) or waits for its `turn`. Full: too many wait already."""
        side = self._side(tenant)
        self._seq += 1
        call = Call(self, tenant, klass, owner, self._seq, max_wait_ms)
        call.looks = looks
        if side.gate.open and not side.waiting and side.has_room() and self.fresh:
            call.state = CallState.RUNNING
            side.running.add(call)
            return call
        if self._waiting >= self.max_waiting:
            return Full(self._waiting)
        self._wait(side, call)
        return call

    def requeue(self, call: Call, *, parked: bool) -> None:
        """See `Call.requeue`."""
        if call.state is not CallState.RUNNING:
            return
        side = self._side(call.tenant)
        self._stop_running(side, call)
        call.cut_reason = None
        self._wait(side, call)
        if parked:
            call.state = CallState.PARKED
        self._pump(side)

    def unpark(self, call: Call) -> None:
        """See `Call.unpark`."""
        if call.state is CallState.PARKED:
            call.state = CallState.WAITING
            self._pump(self._side(call.tenant))

    def finish(self, call: Call) -> None:
        """See `Call.finish`."""
        side = self._side(call.tenant)
        if call.state is CallState.RUNNING:
            call.state = CallState.GONE
            self._stop_running(side, call)
            self._pump(side)
        elif call.state is not CallState.GONE:
            self._leave(side, call, CallState.GONE)

    # ---- gates

    @property
    def fresh(self) -> bool:
        """False once the last successful beat is older than the membership's ttl: then every gate counts as shut."""
        return self.now() < self._fresh_until_ms

    def renew(self, until_ms: int) -> None:
        """Membership holds until then (monotonic ms). Waiting calls behind an open gate run."""
        self._fresh_until_ms = until_ms
        for side in self._tenants.values():
            self._pump(side)

    def close(self, tenant: str, epoch: int) -> int:
        """Shut the gate and return how many calls are in flight. An epoch older than the gate's changes nothing."""
        side = self._side(tenant)
        if epoch >= side.gate.epoch:
            side.gate = Gate(epoch=epoch, open=False)
            self.on_shut(tenant)
        return len(side.running)

    def open(self, tenant: str, epoch: int, swap: str | None = None) -> bool:
        """Open the gate and admit who waits, by class and arrival. False: the epoch is older than the gate's."""
        side = self._side(tenant)
        if epoch < side.gate.epoch:
            return False
        side.gate = Gate(epoch=epoch, open=True)
        side.swap = swap
        self._pump(side)
        return True

    def apply(self, gates: Mapping[str, Gate]) -> None:
        """Take over gates as the store has them (at start, after a lapse); older epochs change nothing."""
        for tenant, gate in gates.items():
            if gate.open:
                self.open(tenant, gate.epoch, self._side(tenant).swap)
            else:
                self.close(tenant, gate.epoch)

    def ahead(self, gates: Mapping[str, Gate]) -> Mapping[str, int]:
        """Tenants whose gate here has a higher epoch than among `gates`: who wrote those has forgotten it."""
        mine = {tenant: side.gate.epoch for tenant, side in self._tenants.items()}
        return {t: epoch for t, epoch in mine.items() if epoch > (gates[t].epoch if t in gates else 0)}

    def gate(self, tenant: str) -> Gate:
        """The gate as this process knows it; closed at epoch 0 before anything was heard."""
        return self._side(tenant).gate

    async def drained(self, tenant: str) -> None:
        """Return when nothing of the tenant is in flight here (sockets closed)."""
        side = self._side(tenant)
        while side.running:
            empty = asyncio.Event()
            side.drained.append(empty)
            await empty.wait()

    def cut(self, tenant: str, reason: str) -> Cut:
        """Interrupt every call in flight. Those with a byte sent end with the reason, the others wait again.

        Each counts as in flight until its handler has closed the upstream socket; `drained` says when all have.
        """
        ended = requeued = 0
        for call in tuple(self._side(tenant).running):
            if call.cut_reason is not None:
                continue
            call.cut_reason = reason
            ended += call.started
            requeued += not call.started
            if call.on_cut is not None:
                call.on_cut()
        return Cut(ended=ended, requeued=requeued)

    def fail(self, tenant: str, error: str) -> int:
        """The tenant could not be loaded: every waiting call ends with `error`. Returns how many."""
        side = self._side(tenant)
        calls = [call for _, call in side.waiting]
        for call in calls:
            call.error = error
            self._leave(side, call, CallState.GONE)
        return len(calls)

    # ---- what it looks like

    @property
    def waiting(self) -> int:
        """Calls waiting in this process, all tenants together."""
        return self._waiting

    def in_flight(self, tenant: str) -> int:
        """Calls of the tenant that run in this process."""
        return len(self._side(tenant).running)

    def demand(self) -> tuple[Demand, ...]:
        """One record per tenant and class with a call; `oldest_ms` is the oldest waiting call's arrival, store time."""
        records: list[Demand] = []
        for tenant, side in self._tenants.items():
            for klass in WorkClass:
                running = sum(call.klass is klass for call in side.running)
                since = [call.since_ms - call.waited_ms for _, call in side.waiting if call.klass is klass]
                if running or since:
                    oldest = min(since) + self.epoch_offset_ms if since else None
                    records.append(Demand(self.gateway, tenant, klass, len(since), running, oldest))
        return tuple(records)

    def used(self) -> frozenset[str]:
        """The tenants that work, or have since they were last taken out of `worked`."""
        at_work = (tenant for tenant, side in self._tenants.items() if not all(call.looks for call in side.running))
        return frozenset((*self.worked, *at_work))

    # ---- inside

    def _side(self, tenant: str) -> _Tenant:
        side = self._tenants.get(tenant)
        if side is None:
            side = self._tenants[tenant] = _Tenant(self.concurrency.get(tenant))
        return side

    def _wait(self, side: _Tenant, call: Call) -> None:
        call.state = CallState.WAITING
        call.begin(self.now())
        insort(side.waiting, (call.key, call), key=_place)
        self._waiting += 1
        if side.alone_in_class(call):
            self.on_change()

    def _leave(self, side: _Tenant, call: Call, state: CallState) -> None:
        changes = side.alone_in_class(call)
        del side.waiting[side.index(call)]
        self._waiting -= 1
        call.wake(state, self.now())
        if changes:
            self.on_change()

    def _stop_running(self, side: _Tenant, call: Call) -> None:
        side.running.discard(call)
        if not call.looks:
            self.worked.add(call.tenant)
        if not side.running:
            for empty in side.drained:
                empty.set()
            side.drained.clear()

    def _pump(self, side: _Tenant) -> None:
        if not side.waiting or not side.gate.open or not self.fresh:
            return
        for _, call in tuple(side.waiting):
            if not side.has_room():
                return
            if call.state is CallState.WAITING:
                self._leave(side, call, CallState.RUNNING)
                call.swap = side.swap
                side.running.add(call)


def _place(entry: tuple[tuple[int, int], Call]) -> tuple[int, int]:
    return entry[0]


def said(gateway: str, unsaved: Iterable[str], used: Iterable[str]) -> Iterator[Demand]:
    """The words beside calls: who has something to save by the clock (others are not asked), and who worked."""
    for tenant in unsaved:
        yield Demand(gateway, tenant, WorkClass.BATCH, 0, 0, None, unsaved=True)
    for tenant in sorted(used):
        yield Demand(gateway, tenant, WorkClass.BATCH, 0, 0, None, used=True)
