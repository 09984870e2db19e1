"""What holds of the conversation index whatever is asked and told, in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swapper.snapshots.conversation import Kept, Place, Relation, Request
from swapper.snapshots.index import Index, Limits
from tests.unit.index_doubles import CHAT, OTHER, TENANT, answer, body, chat, text

LETTERS = st.text("ab", min_size=1, max_size=6)
TENANTS = st.sampled_from([TENANT, OTHER])


@given(st.lists(LETTERS, max_size=8), LETTERS, LETTERS)
def test_what_was_answered_is_found_as_it_is_and_what_goes_on_from_it_extends_it(
    before: list[str], letters: str, more: str
) -> None:
    index = Index(Limits(conversations=3))
    for one in before:
        answer(index, one)
    answer(index, letters)
    assert index.find(TENANT, chat(letters)).relation is Relation.SAME
    found = index.find(TENANT, chat(letters + "c" + more))
    assert found.relation is Relation.EXTENDS
    assert found.conversation == index.conversation(TENANT, chat(letters).id)


@given(st.text("ab", min_size=1, max_size=5), st.text("xy", min_size=1, max_size=5), st.text(min_size=1, max_size=9))
def test_two_chats_that_share_only_a_system_prompt_never_match(one: str, other: str, system: str) -> None:
    index = Index()
    index.answered(TENANT, chat(one, system), None, 0, 10, 1, None, 0)
    assert index.find(TENANT, chat(other, system)).relation is Relation.NEW
    assert index.find(TENANT, chat(one, system + "!")).relation is Relation.NEW


@given(LETTERS, LETTERS)
def test_a_request_shares_with_the_one_conversation_as_many_links_as_letters(one: str, other: str) -> None:
    index = Index()
    answer(index, one)
    equal = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    assert index.find(TENANT, chat(other)).links == (min(len(one), len(other)) if equal is None else equal)


@given(st.integers(0, 3_000), st.integers(1, 3_000))
def test_a_text_is_extended_by_every_text_that_begins_with_it(length: int, more: int) -> None:
    index = Index()
    index.answered(TENANT, text("x" * length), None, 0, 10, 1, None, 0)
    expected = Relation.EXTENDS if length else Relation.NEW
    assert index.find(TENANT, text("x" * (length + more))).relation is expected


class Anything(RuleBasedStateMachine):
    """Every act of the index in any order, within small limits."""

    @initialize(conversations=st.integers(1, 4), room=st.integers(0, 12_000))
    def begin(self, conversations: int, room: int) -> None:
        self.limits = Limits(conversations, room)
        self.index = Index(self.limits, followed=True)
        self.elsewhere: dict[tuple[str, str], Request] = {}
        self.now = 0

    @rule(tenant=TENANTS, letters=LETTERS, cached=st.integers(0, 9_000), slot=st.none() | st.integers(0, 1))
    def answered(self, tenant: str, letters: str, cached: int, slot: int | None) -> None:
        self.now += 1
        account = answer(self.index, letters, min(cached, 1_000 * len(letters)), at=self.now, tenant=tenant, slot=slot)
        assert 0 <= account.reread <= account.processed
        assert (account.why is None) == (account.reread == 0)
        assert self.index.find(tenant, chat(letters)).relation is Relation.SAME

    @rule(tenant=TENANTS, letters=LETTERS)
    def remembered(self, tenant: str, letters: str) -> None:
        self.index.remembered(tenant, chat(letters), Request(CHAT, body(letters)), 5, self.now)

    @rule(tenant=TENANTS)
    def left(self, tenant: str) -> None:
        self.index.left(tenant)
        assert self.index.talks(tenant) == ()

    @rule(tenant=TENANTS, chats=st.lists(LETTERS, max_size=5))
    def kept(self, tenant: str, chats: list[str]) -> None:
        links = {letters: tuple(link.hex() for link in chat(letters).links) for letters in chats}
        self.index.kept(tenant, [Kept(f"{one}.kv", links[one][-1], links[one], 5) for one in chats])

    @rule(tenant=TENANTS, letters=LETTERS, slot=st.integers(0, 1))
    def placed(self, tenant: str, letters: str, slot: int) -> None:
        self.index.placed(tenant, chat(letters).id, slot)

    @rule(tenant=TENANTS, letters=LETTERS, slot=st.integers(0, 1))
    def stands(self, tenant: str, letters: str, slot: int) -> None:
        before = sum(self.index.counts(tenant).reread.values())
        self.index.stands(tenant, chat(letters).id, slot)
        reread = self.index.counts(tenant).reread.values()
        assert sum(reread) == before
        assert min(reread, default=0) >= 0

    @rule(tenant=TENANTS, letters=LETTERS)
    def stored(self, tenant: str, letters: str) -> None:
        links = tuple(link.hex() for link in chat(letters).links)
        self.index.stored(tenant, Kept("displaced.kv", links[-1], links, 2_000))

    @rule(tenant=TENANTS, letters=LETTERS)
    def lost(self, tenant: str, letters: str) -> None:
        self.index.lost(tenant, chat(letters).id, "why")

    @rule(tenant=TENANTS, letters=LETTERS, slot=st.integers(0, 1))
    def recalled(self, tenant: str, letters: str, slot: int) -> None:
        self.index.recalled(tenant, chat(letters).id, 0, 5, slot)

    @invariant()
    def is_bounded_and_its_memory_is_the_sum_of_its_bodies(self) -> None:
        for tenant, name, talk in self.index.changes():
            self.elsewhere.pop((tenant, name), None)
            if talk is not None and talk.request is not None:
                self.elsewhere[tenant, name] = talk.request
        known = [talk for tenant in (TENANT, OTHER) for talk in self.index.conversations(tenant)]
        assert len(known) == len(self.index) <= self.limits.conversations
        kept = {(tenant, one.id): one.request for tenant in (TENANT, OTHER) for one in self.index.conversations(tenant)}
        assert {key: request for key, request in kept.items() if request is not None} == self.elsewhere
        assert sum(len(request.body) for request in self.elsewhere.values()) == self.index.bytes <= self.limits.bytes

    @invariant()
    def every_conversation_is_somewhere_and_no_slot_holds_two(self) -> None:
        for tenant in (TENANT, OTHER):
            there = self.index.conversations(tenant)
            slots = [talk.slot for talk in there if talk.slot is not None]
            assert len(slots) == len(set(slots))
            assert all(talk.place is Place.SERVER for talk in there if talk.slot is not None)
            assert all((talk.place is Place.DISK) == (talk.snapshot != "") for talk in there)
            assert all((talk.place is Place.COLD) == (talk.reason != "") for talk in there)
            told = {talk.id for talk in there if talk.place is Place.DISK and talk.links.first is None}
            older = [name for name in told if any(talk.went_on_from({name}) for talk in there)]
            assert sum(self.index.places(tenant).values()) == len(there) - len(older)


TestAnything = Anything.TestCase
