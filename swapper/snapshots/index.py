"""The conversations that one gateway process knows: what was last asked, what it left, and where it is.

Invariant: bounded; beyond the limits what was used longest ago goes first, bodies before what is known of them. Every
conversation stands in the tenant's `talks`, in the order of use, and in one of its two ways of being found. Pure: time
is given, nothing is read or written; what is kept elsewhere of a body follows `changes`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from swapper.snapshots.chain import Chain
from swapper.snapshots.conversation import (
    ATTACHED_LINKS,
    NEW,
    Conversation,
    Kept,
    Links,
    Match,
    Place,
    Relation,
    Request,
    Sought,
    Talk,
    compare,
)
from swapper.snapshots.notes import Note
from swapper.snapshots.reread import Account, Counts, Why, account, advise, read_before
from swapper.snapshots.table import Table

_REPLACED = frozenset({Relation.SAME, Relation.EXTENDS, Relation.EDITED})
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Over all tenants: conversations, and bytes of the requests kept of them."""

    conversations: int = 1_000
    bytes: int = 256 << 20


class Index:
    """See the file's head. `followed`: the changes of bodies are noted for `changes`, which then has to be called.

    `watch` is told the tenant of which something has changed, in the midst of that: it may look later only.
    """

    __slots__ = ("_bodies", "_changed", "_followed", "_order", "_tenants", "bytes", "limits", "watch")

    def __init__(self, limits: Limits | None = None, *, followed: bool = False) -> None:
        self.limits = limits or Limits()
        self._followed = followed
        self._tenants: defaultdict[str, Table] = defaultdict(Table)
        self._order: OrderedDict[_Key, None] = OrderedDict()
        self._bodies: OrderedDict[_Key, None] = OrderedDict()
        self._changed: dict[_Key, None] = {}
        self.bytes = 0
        self.watch: Callable[[str], None] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def find(self, tenant: str, chain: Chain) -> Match:
        """The known conversation that shares most links with this request; of several the nearest, then the newest."""
        known = self._tenants.get(tenant)
        if known is None:
            return NEW
        sought = Sought(chain)
        matches = (compare(known.talks[name], sought) for name in known.candidates(sought))
        return max(matches, key=lambda match: match.closeness, default=NEW)

    def version(self, tenant: str) -> int:
        """Another one whenever a conversation of the tenant came or went: what was found before may not be the best."""
        known = self._tenants.get(tenant)
        return 0 if known is None else known.version

    def answered(
        self,
        tenant: str,
        chain: Chain,
        request: Request | None,
        cache_n: int | None,
        prompt_n: int | None,
        predicted_n: int | None,
        slot: int | None,
        now_ms: int,
        match: Match | None = None,
    ) -> Account:
        """A request was answered with these figures, None where the answer has none: the conversation is in the server.

        `request` is None where none may be kept, `slot` where it is not known which one answered. `match` is what
        `find` says now, for whoever has asked already.
        """
        match = self.find(tenant, chain) if match is None else match
        cached, processed, generated = 0, 0, None
        if cache_n is not None and prompt_n is not None:
            cached, processed, generated = cache_n, prompt_n, predicted_n
        spent = account(match, read_before(match, chain), cached, processed, slot)
        origin, saved_ms = "", 0
        if match.conversation is not None and match.relation in _REPLACED:
            origin, saved_ms = match.conversation.origin, match.conversation.saved_ms
            self._drop(tenant, match.conversation.id)
        tokens = 0 if generated is None else cached + processed + max(generated, 1) - 1
        talk = Conversation(Links.of(chain), now_ms, chain.sizes[-1], tokens, cached, processed, request, slot=slot)
        if spent.why is Why.EVICTED and match.conversation is not None:
            talk = replace(talk, evicted=spent.reread, stood=match.conversation.slot)
        self._put(tenant, replace(talk, origin=origin, saved_ms=saved_ms))
        self.count(tenant, spent)
        return spent

    def unseat(self, tenant: str, tokens: int, by: str) -> None:
        """Conversation `by` left so many tokens in a slot nobody knows: whoever has as many may stand there no more."""
        for talk in self.conversations(tenant):
            if talk.slot is not None and talk.tokens == tokens and talk.id != by:
                self._set(tenant, replace(talk, slot=None))

    def stands(self, tenant: str, name: str, slot: int) -> None:
        """It was found out in which slot a conversation was answered: what seemed evicted may have stood in another."""
        talk = self.conversation(tenant, name)
        if talk is None or talk.place is not Place.SERVER:
            return
        if talk.evicted and talk.stood not in (None, slot):
            known = self._tenants[tenant]
            known.counts = known.counts.found_in_another_slot(talk.evicted)
        self._set(tenant, replace(talk, slot=slot, evicted=0, passed=False))

    def recalled(self, tenant: str, name: str, cache_n: int, prompt_n: int, slot: int | None) -> None:
        """We sent a conversation's last request again: it stands in the server as its prompt, and was not used.

        What was read for it counts; what was not read is none of the hits that clients had.
        """
        if (talk := self.conversation(tenant, name)) is not None:
            spent = account(Match(Relation.SAME, talk), talk.prompt, cache_n, prompt_n, slot)
            self.count(tenant, replace(spent, cached=0))
            tokens = cache_n + prompt_n
            there = replace(talk, place=Place.SERVER, slot=slot, tokens=tokens, snapshot="", reason="")
            self._set(tenant, replace(there, restored=False, saved=False, as_prompt=True, passed=False))

    def talks(self, tenant: str) -> tuple[Talk, ...]:
        """What is believed to be in the server, most recent first."""
        there = [talk for talk in self.conversations(tenant) if talk.place is Place.SERVER]
        return tuple(talk.talk() for talk in sorted(there, key=lambda talk: talk.used_ms, reverse=True))

    def unsaved(self) -> tuple[str, ...]:
        """The tenants that have a conversation in a slot which no snapshot has as it is now."""
        return tuple(name for name, known in self._tenants.items() if any(t.unsaved for t in known.talks.values()))

    def conversation(self, tenant: str, name: str) -> Conversation | None:
        """What is known of one."""
        known = self._tenants.get(tenant)
        return None if known is None else known.talks.get(name)

    def conversations(self, tenant: str) -> tuple[Conversation, ...]:
        """All that is known, in no order that means anything."""
        known = self._tenants.get(tenant)
        return () if known is None else tuple(known.talks.values())

    def request(self, tenant: str, name: str) -> Request | None:
        """The last request of a conversation, where it is kept."""
        talk = self.conversation(tenant, name)
        return None if talk is None else talk.request

    def load(self, tenant: str) -> str | None:
        """The swap that loaded the tenant, "" where none is known; None where nothing was noted or told either."""
        known = self._tenants.get(tenant)
        return None if known is None else known.load

    def loaded(self, tenant: str, swap: str) -> None:
        """It was that swap; what is known of the tenant's server is about this one."""
        self._tenants[tenant].load = swap
        self._touch(tenant)

    def noted(self, note: Note) -> None:
        """From the state folder: where conversations were as an earlier process ended, after `remembered`."""
        self._tenants[note.tenant].load = note.load
        for talk in sorted(note.talks, key=lambda talk: talk.used_ms):
            known = self.conversation(note.tenant, talk.id)
            whole = talk if known is None else replace(talk, request=known.request, links=known.links)
            self._put(note.tenant, whole)

    def left(self, tenant: str, reason: str = "the model was unloaded") -> None:
        """Nothing of the tenant is in the server any more, until told otherwise."""
        for talk in self.conversations(tenant):
            if talk.place is Place.SERVER:
                self._set(tenant, replace(talk, place=Place.COLD, slot=None, reason=reason, restored=False))

    def kept(self, tenant: str, snapshots: Iterable[Kept]) -> None:
        """All snapshots of the tenant that are on disk and in no slot, also of conversations never seen here."""
        snapshots = [one for one in snapshots if one.id]
        there = {one.snapshot for one in snapshots}
        for talk in self.conversations(tenant):
            if talk.place is Place.DISK and talk.snapshot not in there:
                self._set(tenant, replace(talk, place=Place.COLD, snapshot="", reason="its snapshot is gone"))
        known = self.conversations(tenant)
        older = {link.hex(): talk.id for talk in known for link in talk.links.newest(ATTACHED_LINKS)[:-1]}
        nearest: dict[str, Kept] = {}
        for one in sorted(snapshots, key=lambda one: one.used_ms):
            talk = self.conversation(tenant, one.id) or self.conversation(tenant, older.get(one.id, ""))
            if talk is None:
                if (links := Links.told(one.links or (one.id,))) is not None:
                    self._put(tenant, _told(links, one))
            elif talk.place is not Place.SERVER and talk.back_to(one.id) <= talk.back_to(nearest.get(talk.id, one).id):
                nearest[talk.id] = one
                self._set(tenant, replace(talk, place=Place.DISK, snapshot=one.snapshot, reason=""))

    def stored(self, tenant: str, one: Kept) -> None:
        """A conversation is on disk now, and in no slot: another one took its place. Maybe it was never seen here.

        What has gone on from it meanwhile is where it was, unless it was nowhere, or came back as that state of it.
        """
        grown = next((talk for talk in self.conversations(tenant) if talk.went_on_from({one.id})), None)
        talk = self.conversation(tenant, one.id) or grown
        if talk is None and one.id and (links := Links.told(one.links or (one.id,))) is not None:
            self._put(tenant, _told(links, one))
        elif talk is not None and (talk.id == one.id or talk.place is Place.COLD or talk.restored):
            there = replace(talk, place=Place.DISK, snapshot=one.snapshot, slot=None, reason="", restored=False)
            self._set(tenant, there)

    def saved(self, tenant: str, name: str, snapshot: str, saved_ms: int, replaces: str = "") -> None:
        """It was saved and stays in the server; what became of it meanwhile has this as its newest snapshot.

        `replaces`, its one before, is gone: who else has that is an older state, where nothing was asked of it since.
        """
        there = self.conversations(tenant)
        went_on = [talk for talk in there if name in (link.hex() for link in talk.links.newest(ATTACHED_LINKS))]
        talk = self.conversation(tenant, name) or max(went_on, key=lambda talk: talk.used_ms, default=None)
        if talk is not None and talk.place is Place.SERVER:
            self._set(tenant, replace(talk, origin=snapshot, saved_ms=saved_ms, saved=talk.id == name))
        for older in self.conversations(tenant):
            if replaces and older.origin == replaces and older.place is Place.SERVER:
                self._set(tenant, replace(older, origin=""))
                if older.restored and older.request is None:
                    self._drop(tenant, older.id)

    def passed(self, tenant: str, names: Iterable[str]) -> None:
        """These cannot be saved as they are, until they are used again."""
        for talk in filter(None, (self.conversation(tenant, name) for name in names)):
            self._set(tenant, replace(talk, passed=True))

    def placed(self, tenant: str, name: str, slot: int, tokens: int = 0) -> Conversation | None:
        """A conversation was restored from disk into a slot; whether it is of use there the next answer shows.

        Its name may be that of the older state that was on disk, which had `tokens`. Returns what stands there now.
        """
        if (talk := self._on_disk(tenant, name)) is not None:
            origin = talk.snapshot or talk.origin
            there = replace(talk, place=Place.SERVER, slot=slot, snapshot="", reason="", restored=True, origin=origin)
            self._set(tenant, there := replace(there, saved_ms=0, tokens=tokens or there.tokens, passed=False))
            return there
        return None

    def found(self, tenant: str, name: str, tokens: int) -> None:
        """A conversation is in the server after all, as far as anybody can tell; in which slot is not known."""
        if (talk := self.conversation(tenant, name)) is not None:
            there = replace(talk, place=Place.SERVER, slot=None, snapshot="", reason="", restored=False)
            self._set(tenant, replace(there, tokens=tokens, passed=False))

    def drop_requests(self, tenant: str) -> None:
        """Nobody is to have the texts of a tenant's conversations any more."""
        for talk in self.conversations(tenant):
            self._drop_body((tenant, talk.id))

    def lost(self, tenant: str, name: str, reason: str) -> None:
        """A conversation is neither in the server nor on disk; its name as with `placed`."""
        if (talk := self._on_disk(tenant, name)) is not None:
            self._set(tenant, replace(talk, place=Place.COLD, slot=None, snapshot="", reason=reason, restored=False))

    def pushed_out(self, tenant: str, slot: int) -> None:
        """What lay in a slot made room as nobody's: who was believed there cannot be asked back."""
        name = self._tenants[tenant].slots.get(slot)
        if name is not None:
            self.lost(tenant, name, "its slot was given to another, and nobody could tell whose conversation lay there")

    def remembered(self, tenant: str, chain: Chain, request: Request, tokens: int, used_ms: int) -> None:
        """From the state folder: what an earlier process knew. Call it oldest first, before anything is answered."""
        links = Links.of(chain)
        reason = "swapper was started anew"
        talk = Conversation(links, used_ms, chain.sizes[-1], tokens, request=request, place=Place.COLD, reason=reason)
        self._put(tenant, talk)

    def counts(self, tenant: str) -> Counts:
        """What the answers of a tenant cost so far."""
        known = self._tenants.get(tenant)
        return Counts() if known is None else known.counts

    def places(self, tenant: str) -> dict[Place, int]:
        """How many conversations are where; one that is known as an older copy of another on disk is none."""
        found = dict.fromkeys(Place, 0)
        talks = self.conversations(tenant)
        told = {talk.id for talk in talks if talk.place is Place.DISK and talk.links.first is None}
        older: set[str] = set()
        for talk in talks if told else ():
            older.update(link.hex() for link in talk.links.newest(ATTACHED_LINKS)[:-1])
        for talk in talks:
            found[talk.place] += talk.id not in told & older
        return found

    def advice(self, tenant: str, n_slots: int | None) -> str | None:
        """What to change so that less is read again, in a sentence; None while there is little to spare."""
        return advise(self.counts(tenant), n_slots)

    def changes(self) -> tuple[tuple[str, str, Conversation | None], ...]:
        """(tenant, id, the conversation or None) of every body kept or dropped since the last call."""
        changed, self._changed = self._changed, {}
        found = [(tenant, name, self.conversation(tenant, name)) for tenant, name in changed]
        return tuple((tenant, name, talk if talk and talk.request else None) for tenant, name, talk in found)

    def _on_disk(self, tenant: str, name: str) -> Conversation | None:
        """The one of this name, else the one on disk of which this is an older state."""
        if (talk := self.conversation(tenant, name)) is not None:
            return talk
        there = (talk for talk in self.conversations(tenant) if talk.place is Place.DISK)
        return next((t for t in there if name in (link.hex() for link in t.links.newest(ATTACHED_LINKS))), None)

    def count(self, tenant: str, spent: Account) -> None:
        """Add to what the answers of a tenant cost: here what was asked for, elsewhere what is no conversation."""
        known = self._tenants[tenant]
        known.counts = known.counts.plus(spent)

    def _put(self, tenant: str, talk: Conversation) -> None:
        """Add one, as the one used last; what no longer fits goes."""
        self._drop(tenant, talk.id)
        self._touch(tenant)
        known, key = self._tenants[tenant], (tenant, talk.id)
        known.version += 1
        self._order[key] = None
        if talk.links.first is None:
            known.told.add(talk.id)
        else:
            known.roots[talk.links.root].add(talk.id)
        if talk.request is not None and len(talk.request.body) > self.limits.bytes:
            talk = replace(talk, request=None)
        known.talks[talk.id] = talk
        if talk.slot is not None:
            known.take_slot(talk.slot, talk.id)
        if talk.request is not None:
            self._bodies[key] = None
            self.bytes += len(talk.request.body)
            self._note(key)
        while self.bytes > self.limits.bytes:
            self._drop_body(next(iter(self._bodies)))
        while len(self._order) > self.limits.conversations:
            self._drop(*next(iter(self._order)))

    def _drop(self, tenant: str, name: str) -> None:
        key, known = (tenant, name), self._tenants[tenant]
        if key not in self._order:
            return
        self._touch(tenant)
        self._drop_body(key)
        known.version += 1
        del self._order[key]
        talk = known.talks.pop(name)
        known.told.discard(name)
        if talk.links.first is not None:
            ids = known.roots[talk.links.root]
            ids.discard(name)
            if not ids:
                del known.roots[talk.links.root]
        if talk.slot is not None and known.slots.get(talk.slot) == name:
            del known.slots[talk.slot]

    def _drop_body(self, key: _Key) -> None:
        tenant, name = key
        talk = self._tenants[tenant].talks[name]
        if talk.request is None:
            return
        del self._bodies[key]
        self.bytes -= len(talk.request.body)
        self._tenants[tenant].talks[name] = replace(talk, request=None)
        self._note(key)

    def _touch(self, tenant: str) -> None:
        if self.watch is not None:
            self.watch(tenant)

    def _note(self, key: _Key) -> None:
        if self._followed:
            self._changed[key] = None

    def _set(self, tenant: str, talk: Conversation) -> None:
        """Another state of one that is there."""
        self._touch(tenant)
        known = self._tenants[tenant]
        before = known.talks[talk.id].slot
        known.talks[talk.id] = talk
        if before is not None and known.slots.get(before) == talk.id:
            del known.slots[before]
        if talk.slot is not None:
            known.take_slot(talk.slot, talk.id)


def _told(links: Links, one: Kept) -> Conversation:
    return Conversation(links, one.used_ms, tokens=one.tokens, place=Place.DISK, snapshot=one.snapshot)
