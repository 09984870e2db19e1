"""The conversations of this gateway process: which call goes on with which, where each is, and what an answer proved.

Invariant: nothing here keeps a client waiting but a conversation that lies on disk and comes back for its call, or one
that is being read for it already; what cannot be told apart stays unproved. A body goes to its own server and nowhere
else. Under `privacy: strict` none is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

import msgspec

from swapper.core.conversations import WORTH_TOKENS, ProofResult, Strategy
from swapper.core.orders import Command, Report
from swapper.gateway.bring import Bringing
from swapper.gateway.known import Known
from swapper.gateway.proof import Ledger, Reuse, Tail, Unproved, finding, pick_slot, read_slots, read_unproved
from swapper.gateway.recall import Recalled, RecallFailed, recall
from swapper.gateway.replay import Replays
from swapper.snapshots.chain import Chain
from swapper.snapshots.conversation import Conversation, Kept, Match, Place, Relation, Request
from swapper.snapshots.index import Index
from swapper.snapshots.reread import Account

if TYPE_CHECKING:
    from swapper.gateway.context import GatewayContext, Target
    from swapper.gateway.noted import Noted
    from swapper.gateway.written import Written

MOST = 100
"""So many conversations are told of at a time, the most recent ones."""
LOOK_S = 2.0
"""A drained gateway waits so long for answers that are still being looked at."""


class Talks:
    """`send` delivers a report; `private`: tenants of which no body is kept; `now_ms`: the store's clock."""

    def __init__(
        self,
        executor: str,
        send: Callable[[Report], Awaitable[None]],
        now_ms: Callable[[], int],
        *,
        index: Index | None = None,
        private: frozenset[str] = frozenset(),
    ) -> None:
        self.index = Index() if index is None else index  # an empty one is false
        self._executor = executor
        self._send = send
        self._now_ms = now_ms
        self._private = private
        self._ledgers: dict[str, Ledger] = {}
        self._moves: dict[str, int] = {}
        self._unsettled: dict[str, list[int | None]] = {}
        self._unread: dict[str, list[str]] = {}
        self._tasks: set[asyncio.Future[object]] = set()
        self._replays = Replays(self._quiet, self._replay)
        self._bringing = Bringing(send, self._in_background)
        self._ctx: GatewayContext | None = None
        self._written: Written | None = None
        self._noted: Noted | None = None

    def keep_in(self, written: Written | None, noted: Noted | None = None) -> None:
        """On disk as well: requests, and where conversations are."""
        self._written, self._noted = written, noted

    def drop_requests(self, tenant: str) -> None:
        """Forget the texts of a tenant's conversations, also those on disk."""
        self.index.drop_requests(tenant)
        if self._written is not None:
            self._written.due()

    def attach(self, ctx: GatewayContext) -> None:
        """Where the servers are, and the session to reach them."""
        self._ctx = ctx

    async def idle(self) -> None:
        """Return when no answer is being looked at."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def looking(self, tenant: str) -> bool:
        """Whether an answer of the tenant is still being looked at."""
        return bool(self._unsettled.get(tenant))

    async def looked(self) -> None:
        """Return when the last answers were looked at, or soon: what they prove is lost once their slots are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self.idle()

    async def close(self) -> None:
        """Give up what is replayed or waited for; what is being looked at has a moment: it is noted for a restart."""
        self._replays.stop_all()
        self._bringing.close()
        await self.looked()
        for task in tuple(self._tasks):
            task.cancel()
        await self.idle()
        for kept in (self._written, self._noted):
            if kept is not None:
                await kept.close()

    # ---- a call

    def know(self, tenant: str, path: str, chain: Chain, body: bytes) -> Known:
        """A call among the conversations: its prompt has this chain."""
        return Known(tenant, chain, None if tenant in self._private else Request(path, body))

    async def ready(self, tenant: str, known: Known | None) -> bool:
        """Before a call is sent: its conversation comes back from disk, and replays make room for it.

        False: the gate has closed over that, and the call had better wait until it opens again.
        """
        self._moved(tenant)
        match = None if known is None else known.match(self.index)
        talk = None if match is None else match.conversation
        await self._replays.make_room(tenant, None if talk is None else talk.id)
        if known is not None and talk is not None:
            await self._bringing.stands(tenant, talk.id)
            match = known.match(self.index)
            talk = match.conversation
        if match is None or talk is None or talk.place is not Place.DISK or not match.of_use:
            return True
        if talk.tokens >= WORTH_TOKENS:
            await self._bringing.wait(tenant, talk.snapshot, lambda: self._wanted(tenant, talk))
        return self._ctx is None or self._ctx.admission.gate(tenant).open

    async def _wanted(self, tenant: str, talk: Conversation) -> Report:
        """What is told to have a conversation back from disk."""
        await self.looked()  # what makes room for it is told by its slot
        ledger = self._ledgers.get(tenant)
        data = {"snapshot": talk.snapshot, "id": talk.id, "tokens": talk.tokens, "talks": self.told(tenant)}
        card = "" if ledger is None else ledger.card
        return Report(self._executor, card, tenant, 0, 0, "wanted", "ok", data=data)

    def saved(self, tenant: str, args: Mapping[str, object]) -> None:
        """A conversation was saved beside the calls, and is in the server all the same."""
        ms = args.get("ms")
        name, snapshot = str(args.get("id")), str(args.get("snapshot"))
        self.index.saved(tenant, name, snapshot, ms if isinstance(ms, int) else 0, str(args.get("replaces") or ""))

    def tap(self, path: str, *, sse: bool) -> Tail:
        """Something that watches an answer pass."""
        return Tail(sse=sse, head=path == "/v1/messages")

    def answered(self, known: Known | None, tail: Tail | None, target: Target) -> None:
        """An answer has passed: note what it says, and find out in the background what it proves.

        `tail` is None where the answer was broken off: its prompt was read all the same.
        """
        self._moved(target.tenant)
        ledger = self._ledgers.get(target.tenant)
        reuse = tail.reuse() if tail is not None and (known is not None or (ledger and ledger.unproved)) else None
        match = None if known is None else known.match(self.index)
        if known is not None and match is not None:
            self._note(known, match, reuse)
        if tail is not None and (known is None or reuse is None) and (spent := tail.spent()) is not None:
            self.index.count(target.tenant, Account(Relation.NEW, spent.cached, spent.processed))
        if self._written is not None:
            self._written.due()
        if reuse is None or self._ctx is None:
            return
        unclear = known is not None and reuse.slot is None and self._ambiguous(known, reuse)
        if (ledger is not None and ledger.unproved) or unclear:
            self._in_background(self._settled(known, match, reuse, target, ledger))
        elif known is not None and reuse.slot is None and (reuse.left or 0) >= WORTH_TOKENS:
            # Its length tells it from all others now; it may not, once another process knows less of them.
            self._in_background(self._settle(known, match, reuse, target, ledger))

    def _ambiguous(self, known: Known, reuse: Reuse) -> bool:
        """Whether another conversation left as many tokens in a slot, so that the number alone tells them not apart."""
        others = self.index.talks(known.tenant)
        return any(talk.tokens == reuse.left and talk.id != known.chain.id for talk in others)

    def _moved(self, tenant: str) -> None:
        """A call is sent or was answered: what is seen of the slots from now on may be its doing."""
        self._moves[tenant] = self._moves.get(tenant, 0) + 1

    def _note(self, known: Known, match: Match, reuse: Reuse | None) -> None:
        cache_n = prompt_n = predicted_n = slot = None
        if reuse is not None:
            cache_n, prompt_n, slot = reuse.cache_n, reuse.prompt_n, reuse.slot
            predicted_n = None if reuse.left is None else reuse.left - cache_n - prompt_n + 1
        chain, request, now_ms = known.chain, known.handed_on(), self._now_ms()
        self.index.answered(known.tenant, chain, request, cache_n, prompt_n, predicted_n, slot, now_ms, match)

    async def _settled(
        self, known: Known | None, match: Match | None, reuse: Reuse, target: Target, ledger: Ledger | None
    ) -> None:
        """While it is not known which slot answered, none is believed to hold another conversation of that length."""
        unsettled = self._unsettled.setdefault(target.tenant, [])
        unsettled.append(reuse.left)
        try:
            slot = await self._settle(known, match, reuse, target, ledger)
        finally:
            unsettled.remove(reuse.left)
        if known is not None and slot is None and reuse.left is not None:
            self.index.unseat(known.tenant, reuse.left, known.chain.id)

    async def _settle(
        self, known: Known | None, match: Match | None, reuse: Reuse, target: Target, ledger: Ledger | None
    ) -> int | None:
        """The slot that answered, where it can be known."""
        slot = reuse.slot
        if slot is None and self._ctx is not None:
            claimed = {} if ledger is None else ledger.claimed
            moves = self._moves.get(target.tenant)
            lines = await read_slots(target, self._ctx.session)
            line = pick_slot(lines, claimed, reuse, latest=moves == self._moves.get(target.tenant))
            if line is not None and line.id_task is not None:
                slot = line.id
                claimed[slot] = line.id_task
        if known is not None and slot is not None:
            self.index.stands(known.tenant, known.chain.id, slot)
        if ledger is not None and self._ledgers.get(target.tenant) is ledger:
            found = finding(ledger, match, reuse, slot)
            self._say_proof(target.tenant, ledger, found)
        return slot

    # ---- the coordinator's words

    def told(self, tenant: str) -> list[dict[str, object]]:
        """The conversations believed to be in the server, as commands and their answers tell of them."""
        unsettled = self._unsettled.get(tenant, ())
        talks = self.index.talks(tenant)
        there = [replace(talk, slot=None) if talk.tokens in unsettled else talk for talk in talks[:MOST]]
        unread = (self.index.conversation(tenant, name) for name in self._unread.get(tenant, ()))
        return [*map(asdict, there), *(_unread(talk) for talk in unread if talk is not None)]

    def closed(self, tenant: str) -> None:
        """The gate closes: nothing is brought or replayed any more; what is in flight may still prove something."""
        for snapshot, name in self._replays.stop(tenant):
            if (ledger := self._ledgers.get(tenant)) is not None and snapshot not in ledger.unproved:
                self._unread.setdefault(tenant, []).append(name)
                why = "the model was unloaded before its turn to be replayed came; it is tried after the next load"
                self._tell_replay(tenant, ledger, {"snapshot": snapshot}, "failed", why)
        self._bringing.closed(tenant)

    def opened_here(self, tenant: str) -> bool:
        """Whether this process was told what came back with the tenant."""
        return tenant in self._ledgers

    def opened(self, tenant: str, card: str, swap: str, args: Mapping[str, object]) -> None:
        """The gate opens. Raises msgspec.ValidationError where the arguments cannot be read."""
        unproved = read_unproved(args.get("unproved"))
        kept = _read_kept(args.get("kept"))
        again_told = tenant in self._ledgers and self._ledgers[tenant].swap == swap
        loaded = bool(args.get("loaded")) and not again_told
        if tenant not in self._ledgers or loaded:  # else it is as it was before the gate closed
            self._ledgers[tenant] = Ledger(card, swap, ())
        if loaded:
            self._unread.pop(tenant, None)
            self.index.loaded(tenant, swap)
            self.index.left(tenant, "the model was unloaded, and this conversation was not saved")
            back = (Kept(one.snapshot, one.id, one.links, one.tokens, one.used_ms) for one in unproved)
            self.index.kept(tenant, (*back, *kept))
        if not again_told:
            for one in unproved:
                there = self.index.placed(tenant, one.id, one.slot, one.tokens) if loaded else None
                self._ledgers[tenant].expect(one if there is None else replace(one, id=there.id))
        told = cast("Sequence[Mapping[str, object]]", args.get("recall") or ())
        again = [one for one in told if one.get("gateway") in (None, self._executor)]
        early = [(o.snapshot, o.id) for o in self._ledgers[tenant].unproved.values() if self._provable(tenant, o)]
        self._replays.start(tenant, [*early, *((str(one["snapshot"]), str(one["id"])) for one in again)])

    def placed(self, tenant: str, args: Mapping[str, object]) -> None:
        """What became of a conversation that was asked for from disk, and of the one that made room for it."""
        snapshot, tokens, slot = str(args.get("snapshot")), args.get("tokens"), args.get("slot")
        for one in _read_kept(args.get("kept")):
            if one.id:
                self.index.stored(tenant, one)
            elif isinstance(slot, int):
                self.index.pushed_out(tenant, slot)
        talks = self.index.conversations(tenant)
        talk = next((talk for talk in talks if talk.place is Place.DISK and talk.snapshot == snapshot), None)
        if talk is not None and args.get("ok") and isinstance(slot, int):
            had = tokens if isinstance(tokens, int) else talk.tokens
            there = self.index.placed(tenant, talk.id, slot, had) or talk
            if (ledger := self._ledgers.get(tenant)) is not None:
                ledger.expect(Unproved(snapshot, slot, had, there.id))
        elif args.get("again"):
            self._bringing.may_come(tenant, snapshot)
            self._bringing.ask_again(tenant, snapshot)
            return
        elif talk is not None and not args.get("stays"):
            why = str(args.get("detail") or "it could not be restored")
            self.index.lost(tenant, talk.id, why)
            self._say_cold(tenant, snapshot, why)
        self._bringing.arrived(tenant, snapshot, came=bool(args.get("ok")))

    async def recall(self, command: Command) -> tuple[Mapping[str, object] | None, str | None]:
        """Carry out a `recall`: the data of its answer, or why it failed."""
        args = command.args
        tenant, name, limit_ms = command.tenant or "", str(args.get("conversation")), args.get("limit_ms")
        limit_s = (limit_ms if isinstance(limit_ms, int) else 0) / 1000
        try:
            with self._bringing.recalling(tenant, name, args.get("for")):
                return asdict(await self._send_again(tenant, name, limit_s)), None
        except RecallFailed as failed:
            if failed.evicted and not args.get("beside"):
                self.index.lost(tenant, name, str(failed))
            return {"evicted": failed.evicted}, str(failed)

    async def _send_again(self, tenant: str, name: str, limit_s: float) -> Recalled:
        """Raises RecallFailed."""
        ctx, request = self._ctx, self.index.request(tenant, name)
        if ctx is None or request is None or tenant not in ctx.targets:
            raise RecallFailed("its last request is not kept (any more)")
        target = ctx.targets[tenant]
        child = await ctx.children.locate(target, ctx.admission.gate(tenant).epoch)
        found = await recall(ctx.session, target, child, request, limit_s)
        self.index.recalled(tenant, name, found.cache_n, found.prompt_n, found.slot)
        return found

    async def _quiet(self, tenant: str) -> None:
        if self._ctx is not None:
            await self._ctx.admission.drained(tenant)

    async def _replay(self, tenant: str, snapshot: str, name: str) -> None:
        """While nobody calls: a conversation that cannot be restored is read again, one that was restored is proved."""
        ctx, ledger, talk = self._ctx, self._ledgers.get(tenant), self.index.conversation(tenant, name)
        if ctx is None or ledger is None:
            return
        proves = snapshot in ledger.unproved
        if proves and (talk is None or not talk.restored):
            return  # it was gone on with, and its own answer tells
        data: dict[str, object] = {"snapshot": snapshot}
        outcome, why = "ok", None
        try:
            if talk is None:
                raise RecallFailed(self._why_not_here(tenant, name))
            found = await self._send_again(tenant, name, ctx.limits.max_wait_ms / 1000)
        except RecallFailed as failed:
            if proves:
                return  # its next answer tells
            outcome, why = "failed", str(failed)
        else:
            if proves:
                match, reuse = Match(Relation.SAME, talk), Reuse(found.cache_n, found.prompt_n, found.slot)
                told = finding(ledger, match, reuse, found.slot)
                # The same prompt again is no fair trial: there are models that can only go on.
                self._say_proof(tenant, ledger, None if told is None else {**told, "continued": False})
                return
            ledger.expect(Unproved(snapshot, found.slot, found.tokens, name))
            data |= asdict(found)
        self._tell_replay(tenant, ledger, data, outcome, why)

    def _why_not_here(self, tenant: str, name: str) -> str:
        went_on = any(name in talk.talk().links for talk in self.index.conversations(tenant))
        if went_on:
            return "it was asked for, and read again, before its turn to be replayed came"
        return "its last request is not kept (any more)"

    def _tell_replay(
        self, tenant: str, ledger: Ledger, data: Mapping[str, object], outcome: str, why: str | None
    ) -> None:
        """Not as part of the replay: that may be cancelled, and what it came to must be told all the same."""
        told = {"swap": ledger.swap, **data}
        self._in_background(
            self._send(Report(self._executor, ledger.card, tenant, 0, 0, "recalled", outcome, why, data=told))
        )

    def _say_proof(self, tenant: str, ledger: Ledger, found: Mapping[str, object] | None) -> None:
        if found is not None:
            report = Report(self._executor, ledger.card, tenant, 0, 0, "proof", "ok", data=found)
            self._in_background(self._send(report))

    def _say_cold(self, tenant: str, snapshot: str, why: str) -> None:
        """One that was kept on disk cannot come back."""
        if (ledger := self._ledgers.get(tenant)) is not None:
            lost = {"swap": ledger.swap, "snapshot": snapshot, "result": ProofResult.COLD.value, "reason": why}
            self._say_proof(tenant, ledger, lost)

    def _provable(self, tenant: str, one: Unproved) -> bool:
        """Whether sending its last request again costs one token: it was saved as that request's prompt, as it is."""
        talk = self.index.conversation(tenant, one.id)
        prompt = talk is not None and talk.as_prompt and talk.request is not None
        return prompt and one.strategy == Strategy.SLOTS

    def _in_background(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _unread(talk: Conversation) -> dict[str, object]:
    """Told as one that waits for its turn to be replayed."""
    return {**asdict(talk.talk()), "unread": True}


def _read_kept(value: object) -> tuple[Kept, ...]:
    """`kept` of an `open` or `placed`: `[{snapshot, id, links, tokens, used_ms}]`."""
    return tuple(msgspec.convert(one, Kept) for one in cast("Sequence[object]", value or ()))
