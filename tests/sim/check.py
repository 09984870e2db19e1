"""What must hold at every moment: the event log is folded as it is written, and the fakes are looked at beside it.

Invariant: it changes nothing and asks nobody; `broken` is the first promise that did not hold, in words. It judges what
is physically there (who holds VRAM, what is in flight), never what a part of swapper believes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from swapper.core.conversations import Conversation, ProofResult
from swapper.core.jobs import Job, JobState
from swapper.core.orders import Report
from swapper.core.types import ACTIVE, Card, Fault, Lease, LeaseState, StepOutcome, Swap
from swapper.store import codec
from swapper.store.memory_library import Library
from swapper.store.memory_streams import written
from swapper.store.protocol import StoredEvent
from tests.sim.jobs import Work
from tests.sim.leaving import Unload, releases
from tests.sim.plan import CardPlan
from tests.sim.seen import Fold, Limits, Pair, Seen
from tests.sim.whose import Heads

LATENCY_MS = 500
"""A grace is counted from the decision; the end is stamped when the store takes it in."""
HEARD_MS = 25_000
"""Until then a gate has heard of the end of its lease, however long the store was away."""
NAMED_MS = 10_000
"""Who holds VRAM for longer than any proof takes is named by one that fails."""
CHANCE_TOKENS = 32
"""So many tokens any two prompts may have in common."""


class Check:
    """See the module text. `held`: who holds how much on a card. `steady_ms`: a clock that is never stepped."""

    def __init__(
        self,
        plans: Iterable[CardPlan],
        held: Mapping[str, Mapping[str, int]],
        steady_ms: Callable[[], int],
        now_ms: Callable[[], int],
        say: Callable[[str], None],
        *,
        measured: bool,
        limits: Limits,
    ) -> None:
        self.fold = Fold()
        self.seen = Seen()
        self.broken: str | None = None
        self.breaking = asyncio.Event()
        self.heads = Heads()
        self.events = 0
        self._plans = {plan.name: plan for plan in plans}
        self._held = held
        self._steady_ms = steady_ms
        self._now_ms = now_ms
        self._say = say
        self._measured = measured
        self._limits = limits
        self.works: Mapping[str, Work] = {}
        """Processes of jobs, by job."""
        self.stuck: set[str] = set()
        """Children whose VRAM stays held: no probe but one that measures can know."""

    def fail(self, text: str) -> None:
        """A promise does not hold."""
        if self.broken is None:
            self.broken = text
            self.breaking.set()
            self._say(f"BROKEN: {text}")

    # The store.

    def wrote(self, library: Library) -> None:
        """Something may have been written: fold what is new in the log."""
        for at, (kind, subject, version, data) in library.streams.after("events", self.fold.last):
            self.fold.last = at
            self.events += 1
            self._take(StoredEvent(written(at), kind, subject, int(version), data))

    def gave_out(self, tokens: Sequence[int]) -> None:
        """A commit gave these out: they rise, in the order of the commits."""
        for token in tokens:
            if token <= self.fold.token:
                self.fail(f"token {token} was given out, at or below {self.fold.token} (S2)")
            self.fold.token = token

    def rewound(self, fold: Fold) -> None:
        """The store went back to what it was when `fold` was copied."""
        now = self.fold
        for name, lease in now.leases.items():
            before = fold.leases.get(name)
            if before is None or before.state is not lease.state or before.token != lease.token:
                self.seen.tainted.add(name)
            if before is None:
                self.seen.lost.add(name)
        self.fold = fold.copy()
        self.seen.rollbacks += 1

    def compare(self, library: Library) -> None:
        """Folding the log gives what is stored."""
        world = library.read(self._now_ms())
        for name, card in world.cards.items():
            if card != self.fold.cards.get(name):
                self.fail(f"the fold of the log is not the stored card {name}")
        for name, lease in self.fold.leases.items():
            stored = library.leases.get(name)
            if stored is None or (stored.state, stored.token, stored.card) != (lease.state, lease.token, lease.card):
                self.fail(f"the fold of the log is not the stored lease {name}")
        for tenant, gate in world.gates.items():
            if codec.gate_text(tenant, gate) != self.fold.docs.get(("tenant", tenant)):
                self.fail(f"the fold of the log is not the stored gate of {tenant}")

    def _take(self, event: StoredEvent) -> None:
        key = (event.type, event.subject)
        if event.type == "swap" and event.version == 0:  # asked for by hand, and not begun
            return
        if event.type in ("lease", "card", "swap", "tenant"):
            before = self.fold.versions.get(key, 0)
            rises = event.version > before if event.type == "tenant" else event.version == before + 1
            if not rises:
                self.fail(f"event version of {event.type} {event.subject} goes from {before} to {event.version}")
            self.fold.versions[key] = event.version
            self.fold.docs[key] = event.data
        match event.type:
            case "lease":
                self._lease(codec.lease_of(event))
            case "card":
                self._card(codec.card_of(event))
            case "swap":
                self._swap(codec.swap_of(event))
            case "conversation":
                self._conversation(codec.conversation_of(event))
            case "alert":
                self._say(f"  alert {event.subject}: {event.data}")
            case _:
                pass

    def _lease(self, lease: Lease) -> None:
        before = self.fold.leases.get(lease.id)
        self.fold.leases[lease.id] = lease
        if before is not None and before.state is lease.state:
            return
        reason = f" ({lease.reason})" if lease.reason else ""
        self._say(f"  {lease.id} {lease.state}{reason}")
        if before is not None and before.state not in ACTIVE:
            self.fail(f"{lease.id} ended as {before.state} and is {lease.state} now")
        if lease.state is LeaseState.GRANTED:
            self._granted(lease)
        elif lease.state not in ACTIVE:
            self.seen.ended[lease.id] = self._steady_ms()
        if lease.state is LeaseState.RELEASED and any(w.lease == lease.id and w.runs for w in self.works.values()):
            self.fail(f"{lease.id} is given back while the process of its job runs (S1)")
        held = before is not None and before.state is LeaseState.GRANTED
        healthy = lease.id in self.seen.dutiful and lease.id not in self.seen.tainted
        if lease.state is LeaseState.EXPIRED and held and healthy:
            self.fail(f"{lease.id} expired although its owner did all that is asked of it")
        held_ms = self._steady_ms() - self.seen.granted.get(lease.id, 0)
        early = held_ms < lease.request.max_hold_ms - LATENCY_MS and lease.id not in self.seen.tainted
        early = early and lease.card not in self.seen.forced
        if lease.state is LeaseState.REVOKED and self._limits.holds and early:
            self.fail(f"{lease.id} was revoked after {held_ms} ms of its {lease.request.max_hold_ms}")
        if lease.state in (LeaseState.EXPIRED, LeaseState.REVOKED, LeaseState.FAILED) and not lease.reason:
            self.fail(f"{lease.id} is {lease.state} without a reason (N1)")

    def _granted(self, lease: Lease) -> None:
        assert lease.card is not None
        assert lease.token is not None
        if lease.id in self.fold.granted:
            self.fail(f"{lease.id} was granted twice")
        self.fold.granted[lease.id] = lease.token
        self.seen.granted[lease.id] = self._steady_ms()
        highest, holder = self.seen.highest.get(lease.card, (0, ""))
        again = lease.token == highest and lease.id == holder and lease.id in self.seen.tainted
        if lease.token <= highest and not again:
            self.fail(f"{lease.id} was granted token {lease.token}, not above {highest} of {holder} (S2)")
        self.seen.highest[lease.card] = max((lease.token, lease.id), (highest, holder))
        self._fits(lease.card, f"{lease.id} was granted")

    def job(self, before: Job | None, job: Job) -> None:
        """A job was written."""
        work = self.works.get(job.id)
        if before is None or before.state is not job.state:
            self._say(f"  {job.id} {job.state}{f' ({job.reason})' if job.reason else ''}")
        if before is not None and before.over:
            self.fail(f"{job.id} ended as {before.state} and is {job.state} now (N1)")
        if job.over and not job.reason and job.state is not JobState.DONE:
            self.fail(f"{job.id} is {job.state} without a reason (N1)")
        if job.over and work is not None and work.runs:
            self.fail(f"{job.id} is {job.state}, and its process runs (N1)")
        well = work is not None and work.status is not None and work.status.code == 0
        if job.state is JobState.DONE and not well:
            self.fail(f"{job.id} is done, and its process did not end well (N1)")

    def _card(self, card: Card) -> None:
        before = self.fold.cards.get(card.name)
        self.fold.cards[card.name] = card
        for order, swap in releases(card).items():
            given = self.seen.ordered.setdefault(order, [])
            given += [swap] if swap not in given[-1:] else []
        if before is None or (before.phase, before.residents) != (card.phase, card.residents):
            self._say(f"  {card.name} {card.phase} residents={','.join(card.residents)} v{card.version}")
        fault, was = card.fault, None if before is None else before.fault
        if (fault is None) != (was is None) and self._measured and card.name not in self.seen.forced:
            self._fault(card.name, fault, was)

    def _fault(self, card: str, fault: Fault | None, was: Fault | None) -> None:
        """It begins and names who holds the VRAM; it ends once that one is gone, and not before.

        A resident that it does not name came after that.
        """
        residents = self.fold.cards[card].residents
        for name, mib in self._held[card].items():
            there_ms = self._steady_ms() - self.seen.came.get((card, name), self._steady_ms())
            told = fault is None or name in fault.reason or "cannot be read" in fault.reason
            if name.startswith("stranger") and there_ms > NAMED_MS and not told:
                self.fail(f"the fault of {card} does not name {name}: {fault and fault.reason}")
            plan = self._plans[card]
            needed = 0 if was is None else min(was.need_mib, plan.capacity)
            blamed = was is not None and (name in was.reason or name.partition(" ")[0] not in residents)
            if blamed and there_ms > HEARD_MS and mib + needed > plan.capacity:
                self.fail(f"the fault of {card} is over though {name} holds {mib} MiB of it still")

    def _swap(self, swap: Swap) -> None:
        before = self.fold.swaps.get(swap.id)
        self.fold.swaps[swap.id] = swap
        if before is None:
            self._say(f"  swap {swap.id} for {swap.cause}: {swap.from_} -> {swap.to}")
            self.seen.drains[swap.id] = self._steady_ms()
        if swap.forced_ms is not None and (before is None or before.forced_ms is None):
            drained_ms = self._steady_ms() - self.seen.drains[swap.id]
            limit_ms = self._limits.drain_ms if swap.drain_ms is None else swap.drain_ms
            if drained_ms < limit_ms - LATENCY_MS and not self.seen.rollbacks:
                self.fail(f"swap {swap.id} ended calls after {drained_ms} ms of the {limit_ms} of a drain")
        if swap.outcome is None or (before is not None and before.outcome is not None):
            return
        self._say(f"  swap {swap.id} {swap.outcome}{f' ({swap.reason})' if swap.reason else ''}")
        if any(record.outcome is StepOutcome.RUNNING for record in swap.steps):
            self.fail(f"swap {swap.id} ended with a step that still runs")
        self._all_told(swap)

    def _all_told(self, swap: Swap) -> None:
        """N3: each conversation of a swap that ended was saved or stated; came back or is stated cold."""
        for talk in swap.conversations:
            if talk.tenant in swap.to and not swap.back and swap.outcome == "done":
                later = talk.kept or talk.strategy == "replay"
                if not talk.restored and not later and not (talk.result is ProofResult.COLD and talk.reason):
                    self.fail(f"swap {swap.id} ends with {talk.snapshot} neither back nor stated cold (N3)")
            elif talk.tenant in swap.from_ and swap.outcome == "done" and not talk.saved and not talk.reason:
                self.fail(f"swap {swap.id} ends with slot {talk.slot} of {talk.tenant} neither saved nor stated (N3)")

    def _conversation(self, talk: Conversation) -> None:
        why = f" ({talk.reason})" if talk.reason else ""
        self._say(f"  {talk.snapshot or talk.tenant} {codec.conversation_state(talk)}{why}")
        if talk.result is ProofResult.WARM:
            model = talk.tenant.partition("/")[2]
            seen = [answer for (name, _), all_ in self.seen.reused.items() if name == model for answer in all_]
            cached = talk.cache_n or 0
            its_own = any(n == cached and not self.heads.strangers(talk.head, who) for n, who, _ in seen)
            if not its_own or (cached <= CHANCE_TOKENS and 2 * cached < talk.tokens):
                self.fail(f"{talk.snapshot} is said to be warm by {cached} of {talk.tokens}; seen were {seen} (T1)")

    # The cards.

    def took(self, card: str, holder: str) -> None:
        """Somebody took VRAM."""
        self._fits(card, f"{holder} took VRAM")

    def _fits(self, card: str, when: str) -> None:
        """S1 and S3, judged by who holds what just now."""
        plan, held = self._plans[card], self._held[card]
        granted = [
            lease
            for lease in self.fold.leases.values()
            if lease.state is LeaseState.GRANTED and lease.card == card and lease.id not in self.seen.tainted
        ]
        whole = next((lease for lease in granted if lease.whole), None)
        real = {name: mib for name, mib in held.items() if not self._excused(card, name)}
        beside = [name for name in real if whole is None or name not in self._its(whole)] + [
            f"lease {lease.id}" for lease in granted if lease is not whole and f"lease {lease.id}" not in held
        ]
        if whole is not None and beside:
            self.fail(f"{when} on {card}: {whole.id} has all of it, but so have {', '.join(sorted(set(beside)))} (S1)")
        parts = [lease for lease in granted if not lease.whole]
        promised = {name: lease.request.vram_mib or 0 for lease in parts for name in self._its(lease)[:1]}
        total = sum((promised | real).values())
        if total > plan.total_mib:
            who = ", ".join(f"{name} {mib}" for name, mib in sorted((promised | real).items()))
            self.fail(f"{when} on {card}: {total} MiB of {plan.total_mib}: {who} (S3)")

    def _its(self, lease: Lease) -> Sequence[str]:
        """Under which names it may hold VRAM: that of what runs in it now, else its own."""
        asked, card = lease.request.holder, str(lease.card)
        runs = [name for name in self._held[card] if asked is not None and name.startswith(f"{asked} run ")]
        return runs or [f"lease {lease.id}"]

    def rendering(self, tenant: str, name: str) -> None:
        """What is on its card by a lease of its own begins to work in it."""
        ended_ms = self.seen.ended.get(name)
        if ended_ms is not None and self._steady_ms() - ended_ms > HEARD_MS and name not in self.seen.tainted:
            self.fail(f"{tenant} works in {name}, which ended {self._steady_ms() - ended_ms} ms ago (S2)")

    def came(self, card: str, holder: str) -> None:
        """Somebody took VRAM of himself: that is against no promise until the next look at the card."""
        self.seen.came[card, holder] = self._steady_ms()

    def proved(self, card: str, since_ms: int, unread_ms: int | None) -> None:
        """An agent says that the card is free, by a look that began then. `unread_ms`: it cannot be read since then."""
        if unread_ms is not None and unread_ms <= since_ms and self._measured:
            self.fail(f"{card} is said to be free, and cannot be read (S1)")
        self.seen.proved[card] = since_ms

    def _excused(self, card: str, holder: str) -> bool:
        """Who holds VRAM against the rules, in a way that swapper cannot know."""
        if self.seen.came.get((card, holder), -1) >= self.seen.proved.get(card, 0):
            return True
        if holder in self.stuck:
            return not self._measured
        if not holder.startswith("lease "):
            return False
        lease = self.fold.leases.get(holder.removeprefix("lease "))
        if lease is None or lease.id in self.seen.tainted:
            return True
        if self._measured or lease.state is LeaseState.GRANTED:
            return False
        believed = lease.state in (LeaseState.EXPIRED, LeaseState.REVOKED)
        return believed and self._steady_ms() - self.seen.ended[lease.id] >= self._limits.grace_ms - LATENCY_MS

    # The agents and the servers.

    def heard(self, report: Report) -> None:
        """An executor refuses."""
        which = f"{report.token & 0xFFFFF}.{report.n}"
        self._say(f"    {report.executor} refuses {report.verb} {report.tenant} {which}: {report.detail}")

    def execute(self, card: str, tenant: str | None, pair: Pair, verb: str) -> None:
        """An agent carries a command out (S2)."""
        newest = self.seen.begun.get((card, tenant), (0, 0))
        side_by_side = verb in ("save", "restore") and pair[0] == newest[0]
        if pair < newest and not side_by_side:
            self.fail(f"{verb} {tenant or card} {pair} carried out after {newest} (S2)")
        self.seen.begun[card, tenant] = max(pair, newest)

    def unloading(self, card: str, unload: Unload) -> None:
        """The router is told to unload a tenant."""
        tenant = unload.tenant
        order = (card, tenant, self.seen.begun.get((card, tenant), (0, 0)))
        now = self.fold.cards[card].swap if card in self.fold.cards else None
        put_back = self.seen.rollbacks > 0
        found = [unload.wrong(swap, self.heads, put_back=put_back) for swap in self.seen.ordered.get(order, [now])]
        if None not in found:
            self.fail(str(found[-1]))

    def restored(self, model: str, slot: int) -> None:
        """A slot has a conversation again: what was reused before proves no more than is being told just now."""
        since_ms = self._steady_ms() - LATENCY_MS
        self.seen.reused[model, slot] = [one for one in self.seen.reused.get((model, slot), []) if one[2] > since_ms]

    def answered(self, model: str, slot: int, cached: int, talk: str) -> None:
        """An answer to that talk took so many tokens from the slot."""
        self.seen.reused.setdefault((model, slot), []).append((cached, talk, self._steady_ms()))
