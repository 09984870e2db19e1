"""A commit in the making: the machine's scratch pad. Pure, never leaves the core; `commit()` freezes it.

Invariant: commands of one swap are numbered without gaps in the order they are written, and whatever is pending in the
swap is exactly what has been commanded and not yet answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from swapper.core import unused
from swapper.core.commit import Alert, AlertKind, Commit, LeaseChange
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.orders import Command
from swapper.core.spec import Spec
from swapper.core.types import Card, Gate, Step, StepOutcome, StepRecord, Swap, World

_SEEN = frozenset({str(Step.RELEASE), str(Step.VACATE), str(Step.LOAD)})
"""Orders that change what an agent sees, or what its readings count."""


@dataclass(slots=True)
class Draft:
    """Mutable view of one card and its swap; see the module text."""

    world: World
    spec: Spec
    card: Card
    _swap: Swap | None = None
    leases: list[LeaseChange] = field(default_factory=list[LeaseChange])
    ended: list[Swap] = field(default_factory=list[Swap])
    gates: dict[str, Gate] = field(default_factory=dict[str, Gate])
    commands: list[Command] = field(default_factory=list[Command])
    conversations: list[Conversation] = field(default_factory=list[Conversation])
    alerts: list[Alert] = field(default_factory=list[Alert])
    tokens: list[int] = field(default_factory=list[int])
    over: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._swap = self.card.swap

    @property
    def now(self) -> int:
        """The store's clock, ms."""
        return self.world.now_ms

    @property
    def swap(self) -> Swap:
        """The running swap; asking without one is a bug."""
        assert self._swap is not None
        return self._swap

    @property
    def running(self) -> bool:
        """Whether the card has a swap."""
        return self._swap is not None

    def begin(self, swap: Swap) -> None:
        """Give the card a swap; its token is given out by that."""
        self._swap = swap
        self.tokens.append(swap.token)

    def end(self, swap: Swap, *, again: bool = False) -> None:
        """The swap is over: it goes to the record, the card has none, and so is the errand it was for.

        `again`: an errand begins anew, under the same id; its record stays open for that.
        """
        self._swap = None
        self._tell_cold(swap)
        errand = next((one for one in self.world.errands if one.id == swap.id), None)
        if errand is not None and again:
            return
        if errand is not None:
            self.over.append(errand.id)
        if errand is not None and errand.sends_away and not swap.back:
            self.card = unused.sent_off(self.spec, self.card, errand, swap.from_)
        if swap.listed:
            self.ended.append(swap)

    def _tell_cold(self, swap: Swap) -> None:
        """Of those that an answer shows to be cold later there is an event each; these no answer is waited for."""
        cold = [c for c in swap.conversations if c.saved and c.result is ProofResult.COLD and c.cache_n is None]
        for tenant in dict.fromkeys(c.tenant for c in cold):
            mine = [c for c in cold if c.tenant == tenant]
            count = f"{len(mine)} conversations" if len(mine) > 1 else "a conversation"
            reasons = "; ".join(dict.fromkeys(c.reason or "no reason is known" for c in mine))
            self.alert(f"{count} of {tenant} came back cold: {reasons}", AlertKind.COLD, tenant=tenant)

    def update(self, **changes: object) -> None:
        """Replace fields of the swap."""
        self._swap = replace(self.swap, **changes)  # pyright: ignore[reportArgumentType]

    def gate(self, tenant: str, *, open_: bool, above: int = 0) -> int:
        """Open or shut a tenant's gate; returns the new epoch, higher than any before and than `above`."""
        before = self.gates.get(tenant) or self.world.gates.get(tenant) or Gate(0, open=False)
        self.gates[tenant] = Gate(max(before.epoch, above) + 1, open=open_)
        return self.gates[tenant].epoch

    def command(self, executor: str, verb: str, tenant: str | None, args: Mapping[str, object] | None = None) -> None:
        """Order one executor and remember that its answer is awaited."""
        swap = self.swap
        command = Command(executor, self.card.name, tenant, swap.token, swap.next_n, verb, dict(args or {}))
        self.commands.append(command)
        self.update(next_n=swap.next_n + 1, pending=(*swap.pending, command))
        if executor.startswith("agent:") and verb in _SEEN:
            self.card = replace(self.card, ordered=(swap.token, command.n))

    def tell_gateways(self, verb: str, tenant: str, args: Mapping[str, object]) -> None:
        """Order every live gateway process."""
        for gateway in self.world.gateways:
            self.command(f"gateway:{gateway}", verb, tenant, args)

    def order(self, verb: str, tenant: str, args: Mapping[str, object]) -> None:
        """Tell every live gateway something outside a swap: token 0, nobody waits for the answer; epochs order it."""
        for gateway in self.world.gateways:
            self.commands.append(Command(f"gateway:{gateway}", self.card.name, tenant, 0, 0, verb, dict(args)))

    def let_in(self, tenant: str, *, above: int = 0, loaded: bool = False) -> None:
        """Open a tenant's gate outside a swap's own steps: nothing was restored. `loaded`: somebody loaded it anew."""
        epoch = self.gate(tenant, open_=True, above=above)
        self.order(Step.OPEN, tenant, {"epoch": epoch, "swap": None, "loaded": loaded, "unproved": []})

    def agent_of(self, tenant: str) -> str:
        """Executor name of the agent beside a tenant."""
        configured = self.spec.tenants.get(tenant)
        host = configured.host if configured else self.spec.cards[self.card.name].host
        return f"agent:{host}"

    def record(self, step: Step, tenant: str | None) -> None:
        """Open a line in the swap's table (once per step and tenant, unless it is tried again)."""
        open_lines = (r for r in self.swap.steps if r.outcome is StepOutcome.RUNNING)
        if not any(r.step is step and r.tenant == tenant for r in open_lines):
            self.update(steps=(*self.swap.steps, StepRecord(step, tenant, self.now)))

    def finish(
        self,
        step: Step,
        tenant: str | None,
        outcome: StepOutcome = StepOutcome.DONE,
        detail: str | None = None,
        backend_ms: float | None = None,
    ) -> None:
        """Close that line; its backend time adds up over several commands."""
        self._amend(
            step,
            tenant,
            lambda r: replace(
                r,
                ms=self.now - r.started_ms,
                outcome=outcome,
                detail=detail or r.detail,
                backend_ms=_sum(r.backend_ms, backend_ms),
            ),
        )

    def note(self, step: Step, tenant: str | None, backend_ms: float | None) -> None:
        """Add backend time to an open line."""
        self._amend(step, tenant, lambda r: replace(r, backend_ms=_sum(r.backend_ms, backend_ms)))

    def _amend(self, step: Step, tenant: str | None, change: Callable[[StepRecord], StepRecord]) -> None:
        def amended(r: StepRecord) -> StepRecord:
            mine = r.step is step and r.tenant == tenant and r.outcome is StepOutcome.RUNNING
            return change(r) if mine else r

        self.update(steps=tuple(amended(r) for r in self.swap.steps))

    def alert(self, text: str, kind: AlertKind = AlertKind.OTHER, **data: object) -> None:
        """Tell a person."""
        self.alerts.append(Alert(self.card.name, text, data, kind))

    def commit(self) -> Commit:
        """Freeze."""
        running = (self._swap,) if self._swap is not None and self._swap.listed else ()
        return Commit(
            cards=(replace(self.card, swap=self._swap),),
            leases=tuple(self.leases),
            swaps=(*running, *self.ended),
            gates=dict(self.gates),
            commands=tuple(self.commands),
            conversations=tuple(self.conversations),
            alerts=tuple(self.alerts),
            tokens=tuple(self.tokens),
            over=tuple(self.over),
        )


def _sum(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else a + b
