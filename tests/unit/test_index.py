"""The conversation index: which conversation a request goes on, where each one is, and what is told of it."""

from __future__ import annotations

import pytest

from swapper.snapshots import conversation
from swapper.snapshots.chain import BLOCK_BYTES, Chain
from swapper.snapshots.conversation import Kept, Place, Relation, Request
from swapper.snapshots.index import Index, Limits
from swapper.snapshots.reread import Why
from tests.unit.index_doubles import CHAT, OTHER, TENANT, answer, body, chat, ids, text


def relation(index: Index, letters: str) -> Relation:
    return index.find(TENANT, chat(letters)).relation


def kept(letters: str, snapshot: str = "one.kv", tokens: int = 3_000) -> Kept:
    links = tuple(link.hex() for link in chat(letters).links[-8:])
    return Kept(snapshot, links[-1], links, tokens)


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("abc", Relation.SAME),
        ("abcd", Relation.EXTENDS),
        ("abcdefgh", Relation.EXTENDS),
        ("abC", Relation.EDITED),
        ("abCde", Relation.EDITED),
        ("aBc", Relation.BRANCHED),
        ("a", Relation.BRANCHED),
        ("xbc", Relation.NEW),
    ],
)
def test_how_a_request_stands_to_the_conversation_it_shares_most_with(letters: str, expected: Relation) -> None:
    index = Index()
    answer(index, "abc")
    assert relation(index, letters) is expected


def test_the_conversation_with_the_deepest_shared_link_is_the_one_that_is_found() -> None:
    index = Index()
    answer(index, "abXYZ", at=1)
    answer(index, "abcde", at=2)
    answer(index, "aMNOP", at=3)
    found = index.find(TENANT, chat("abcdefg"))
    assert found.conversation is not None
    assert found.conversation.id == chat("abcde").id


def test_what_another_tenant_was_asked_is_not_found() -> None:
    index = Index()
    answer(index, "abc", tenant=OTHER)
    assert relation(index, "abc") is Relation.NEW


def test_a_conversation_that_goes_on_is_one_and_one_that_branches_is_another() -> None:
    index = Index()
    for letters in ("a", "abc", "abc", "abcde", "abcdE"):
        answer(index, letters)
    assert ids(index.talks(TENANT)) == [chat("abcdE").id]
    answer(index, "aBc")
    assert len(index) == 2


def test_what_is_told_of_a_conversation_is_its_last_links_what_it_left_and_whether_it_can_be_asked_again() -> None:
    index = Index()
    letters = "abcdefghijk"
    index.answered(TENANT, chat(letters), Request(CHAT, body(letters)), 40, 60, 8, 1, 77)
    index.answered(TENANT, chat("xyz"), None, 0, 10, None, None, 78)
    strict, talk = index.talks(TENANT)
    assert talk.links == tuple(link.hex() for link in chat(letters).links[-8:])
    assert (talk.id, talk.tokens, talk.used_ms, talk.recallable) == (talk.links[-1], 107, 77, True)
    assert (strict.tokens, strict.recallable) == (0, False)
    assert index.request(TENANT, talk.id) == Request(CHAT, body(letters))
    assert index.request(TENANT, strict.id) is None


def test_talks_are_told_most_recent_first_and_only_those_in_the_server() -> None:
    index = Index()
    for at, letters in enumerate(("abc", "xyz", "mno")):
        answer(index, letters, at=at)
    index.lost(TENANT, chat("xyz").id, "disk full")
    assert ids(index.talks(TENANT)) == [chat("mno").id, chat("abc").id]
    index.left(TENANT)
    assert index.talks(TENANT) == ()
    cold = index.conversation(TENANT, chat("abc").id)
    assert cold is not None
    assert (cold.place, cold.reason) == (Place.COLD, "the model was unloaded")


def test_what_came_back_is_told_again_and_what_is_on_disk_is_found_there() -> None:
    index = Index()
    answer(index, "abc", at=1)
    answer(index, "xyz", at=2)
    index.left(TENANT)
    index.kept(TENANT, [kept("xyz")])
    index.placed(TENANT, chat("abc").id, 1)
    assert ids(index.talks(TENANT)) == [chat("abc").id]
    found = index.find(TENANT, chat("xyzq")).conversation
    assert found is not None
    assert (found.place, found.snapshot) == (Place.DISK, "one.kv")
    assert index.places(TENANT) == {Place.SERVER: 1, Place.DISK: 1, Place.COLD: 0}
    index.kept(TENANT, [])
    assert index.places(TENANT) == {Place.SERVER: 1, Place.DISK: 0, Place.COLD: 1}


def test_a_conversation_that_came_back_is_told_with_its_snapshot_and_its_slot_as_long_as_it_goes_on() -> None:
    index = Index()
    answer(index, "abc")
    index.left(TENANT)
    index.kept(TENANT, [kept("abc")])
    index.placed(TENANT, chat("abc").id, 1)
    assert [(talk.snapshot, talk.slot) for talk in index.talks(TENANT)] == [("one.kv", 1)]
    answer(index, "abcde", 3_000)
    answer(index, "aXY")
    assert {talk.id: talk.snapshot for talk in index.talks(TENANT)} == {chat("abcde").id: "one.kv", chat("aXY").id: ""}


def test_a_conversation_that_had_to_make_room_is_on_disk() -> None:
    index = Index()
    answer(index, "abc", slot=0)
    index.stored(TENANT, Kept("displaced.kv", chat("abc").id, (), 2_000))
    assert index.talks(TENANT) == ()
    assert index.find(TENANT, chat("abc")).conversation == index.conversation(TENANT, chat("abc").id)
    assert index.places(TENANT)[Place.DISK] == 1


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("abcdefghijklm", Relation.SAME),
        ("abcdefghijklmno", Relation.EXTENDS),
        ("abcdefghijklM", Relation.EDITED),
        ("abcdefghijKl", Relation.BRANCHED),
        ("abC", Relation.NEW),
    ],
)
def test_after_a_restart_a_manifest_is_enough_to_find_a_conversation(letters: str, expected: Relation) -> None:
    index = Index()
    index.kept(TENANT, [kept("abcdefghijklm")])
    assert relation(index, letters) is expected


def test_a_snapshot_of_an_older_state_is_where_its_conversation_is_and_the_newest_one_counts() -> None:
    index = Index()
    answer(index, "abcde")
    index.left(TENANT)
    index.kept(TENANT, [kept("abc", "old.kv")])
    assert len(index) == 1
    assert index.find(TENANT, chat("abcdefg")).conversation == index.conversation(TENANT, chat("abcde").id)
    assert index.places(TENANT)[Place.DISK] == 1
    index.kept(TENANT, [kept("abcde", "new.kv"), kept("abc", "old.kv")])
    found = index.find(TENANT, chat("abcdefg")).conversation
    assert found is not None
    assert found.snapshot == "new.kv"


def test_an_older_state_that_is_restored_or_refused_is_its_conversations() -> None:
    for refused in (False, True):
        index = Index()
        answer(index, "abcde")
        index.left(TENANT)
        index.kept(TENANT, [kept("abc")])
        if refused:
            index.lost(TENANT, kept("abc").id, "cut short")
        else:
            index.placed(TENANT, kept("abc").id, 1)
        held = index.conversation(TENANT, chat("abcde").id)
        assert held is not None
        assert (held.place, held.slot) == ((Place.COLD, None) if refused else (Place.SERVER, 1))


@pytest.mark.parametrize("links", [(), ("zz",), ("ab",), ("",)])
def test_a_manifest_that_tells_of_no_conversation_or_of_no_links_makes_none(links: tuple[str, ...]) -> None:
    index = Index()
    index.kept(TENANT, [Kept("one.kv", links[0] if links else "", links, 5)])
    assert len(index) == 0


def test_a_text_that_goes_on_from_another_extends_it_wherever_that_ended() -> None:
    for length in (1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5):
        index, prompt = Index(), "x" * length
        index.answered(TENANT, text(prompt), None, 0, length, 1, None, 0)
        assert index.find(TENANT, text(prompt)).relation is Relation.SAME
        assert index.find(TENANT, text(prompt + "y")).relation is Relation.EXTENDS
        assert index.find(TENANT, text(prompt + "y" * 3 * BLOCK_BYTES)).relation is Relation.EXTENDS
        assert index.find(TENANT, text("?" + prompt)).relation is Relation.NEW


def test_texts_with_the_same_beginning_are_two_conversations() -> None:
    index, preamble = Index(), "x" * 2 * BLOCK_BYTES
    index.answered(TENANT, text(preamble + "one"), None, 0, 2_000, 1, None, 0)
    assert index.find(TENANT, text(preamble + "two")).relation is Relation.BRANCHED
    index.answered(TENANT, text(preamble + "two"), None, 2_000, 10, 1, None, 0)
    assert len(index) == 2


def test_a_text_is_found_by_its_manifest_too() -> None:
    for prompt in ("short", "x" * 2 * BLOCK_BYTES + "rest"):
        index = Index()
        links = tuple(link.hex() for link in text(prompt).links)
        index.kept(TENANT, [Kept("one.kv", links[-1], links, 10)])
        assert index.find(TENANT, text(prompt + " goes on")).relation is Relation.EXTENDS


def test_of_a_very_long_chat_the_newest_links_are_kept_and_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MOST_LINKS", 4)
    index = Index()
    answer(index, "abcdefghij")
    held = index.conversation(TENANT, chat("abcdefghij").id)
    assert held is not None
    assert len(held.links) == 4
    expected = {"abcdefghijk": "extends", "abcdefghiJ": "edited", "abcdefghIj": "branched", "abC": "branched"}
    assert {letters: relation(index, letters).value for letters in expected} == expected


def test_beyond_the_limit_the_conversation_goes_that_was_used_longest_ago() -> None:
    index = Index(Limits(conversations=2))
    answer(index, "abc", at=1)
    answer(index, "xyz", at=2, tenant=OTHER)
    answer(index, "abcde", at=3)
    answer(index, "mno", at=4)
    assert index.talks(OTHER) == ()
    assert ids(index.talks(TENANT)) == [chat("mno").id, chat("abcde").id]
    assert relation(index, "xyz") is Relation.NEW


def test_beyond_the_budget_the_oldest_bodies_go_and_what_is_known_stays() -> None:
    size = len(body("abc"))
    index = Index(Limits(bytes=2 * size))
    for at, letters in enumerate(("abc", "xyz", "mno")):
        answer(index, letters, at=at)
    assert [talk.recallable for talk in index.talks(TENANT)] == [True, True, False]
    answer(index, "qrstuvwxyz", at=9)
    assert [talk.recallable for talk in index.talks(TENANT)] == [False, True, True, False]
    assert index.bytes == 2 * size


def test_a_body_that_is_kept_elsewhere_can_follow_what_is_kept_here() -> None:
    index = Index(Limits(conversations=1), followed=True)
    answer(index, "a")
    assert [(name, talk is not None) for _, name, talk in index.changes()] == [(chat("a").id, True)]
    answer(index, "abc")
    assert {name: talk is not None for _, name, talk in index.changes()} == {chat("a").id: False, chat("abc").id: True}
    assert index.changes() == ()


def test_what_an_earlier_process_knew_is_cold_until_it_is_said_to_be_somewhere() -> None:
    index = Index()
    index.remembered(TENANT, chat("abc"), Request(CHAT, body("abc")), 3_000, 5)
    assert index.talks(TENANT) == ()
    assert relation(index, "abcd") is Relation.EXTENDS
    index.placed(TENANT, chat("abc").id, 0)
    assert [(talk.tokens, talk.recallable) for talk in index.talks(TENANT)] == [(3_000, True)]


def test_a_recalled_conversation_is_in_the_server_and_was_not_used() -> None:
    index = Index()
    answer(index, "abc", at=5)
    index.left(TENANT)
    index.recalled(TENANT, chat("abc").id, 0, 2_990, 1)
    assert [(talk.tokens, talk.used_ms) for talk in index.talks(TENANT)] == [(2_990, 5)]


@pytest.mark.parametrize("begin", ["", "s" * BLOCK_BYTES])
@pytest.mark.parametrize("told", [False, True])
def test_among_many_texts_the_one_that_goes_on_is_found_and_a_block_is_hashed_byte_by_byte_once_at_most(
    begin: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, chains = Index(), [text(f"{begin}{number}: what is it") for number in range(50)]
    if told:
        links = [tuple(link.hex() for link in chain.links) for chain in chains]
        index.kept(TENANT, [Kept(f"{n}.kv", one[-1], one, 100, n) for n, one in enumerate(links)])
    else:
        for number, chain in enumerate(chains):
            index.answered(TENANT, chain, None, 0, 100, 1, None, number)
    asked: list[int] = []
    ends = Chain.ends

    def counted(chain: Chain, block: int) -> frozenset[bytes]:
        asked.append(block)
        return ends(chain, block)

    monkeypatch.setattr(Chain, "ends", counted)
    found = index.find(TENANT, text(f"{begin}7: what is it for"))
    assert found.relation is Relation.EXTENDS
    assert found.conversation is not None
    assert found.conversation.id == chains[7].id
    assert len(asked) == len(set(asked)) <= 2


def test_a_text_without_its_bytes_is_still_found_by_its_whole_blocks_and_is_no_chat() -> None:
    index, begin = Index(), "s" * BLOCK_BYTES
    index.answered(TENANT, text(begin + "one"), None, 0, 100, 1, None, 0)
    assert index.find(TENANT, text(begin + "one more")).relation is Relation.EXTENDS
    assert index.find(TENANT, text(begin + "one more").without_text()).relation is Relation.BRANCHED
    assert index.find(TENANT, text(begin + "one").without_text()).relation is Relation.SAME


def test_who_is_unknown_is_nobody() -> None:
    index = Index()
    index.placed(TENANT, "x", 0)
    index.stored(TENANT, Kept("one.kv", "x", (), 2_000))
    index.lost(TENANT, "x", "why")
    index.left(TENANT)
    index.recalled(TENANT, "x", 0, 0, None)
    assert (index.request(TENANT, "x"), index.conversation(TENANT, "x"), index.talks(TENANT)) == (None, None, ())
    assert index.find(TENANT, text("x")).conversation is None


def test_one_that_made_room_and_was_never_seen_here_is_on_disk_all_the_same() -> None:
    index = Index()
    links = tuple(link.hex() for link in chat("abc").links)
    index.stored(TENANT, Kept("displaced.kv", links[-1], links, 2_000, 5))
    found = index.find(TENANT, chat("abcde"))
    assert found.conversation is not None
    assert (found.relation, found.conversation.place) == (Relation.EXTENDS, Place.DISK)
    assert (found.conversation.snapshot, found.conversation.tokens) == ("displaced.kv", 2_000)


def test_what_has_gone_on_since_it_made_room_stays_where_it_is() -> None:
    index = Index()
    answer(index, "abcde", slot=0)
    index.stored(TENANT, Kept("displaced.kv", chat("abc").id, (chat("abc").id,), 2_000))
    assert [talk.id for talk in index.talks(TENANT)] == [chat("abcde").id]
    assert len(index.conversations(TENANT)) == 1
    index.left(TENANT)
    index.stored(TENANT, Kept("displaced.kv", chat("abc").id, (chat("abc").id,), 2_000))
    (talk,) = index.conversations(TENANT)
    assert (talk.id, talk.place, talk.snapshot) == (chat("abcde").id, Place.DISK, "displaced.kv")


def test_what_came_back_as_an_older_state_and_made_room_as_that_is_on_disk_again() -> None:
    index = Index()
    answer(index, "abcde", slot=0)
    index.left(TENANT)
    index.kept(TENANT, [Kept("before.kv", chat("abc").id, (chat("abc").id,), 2_000)])
    index.placed(TENANT, chat("abc").id, 0, 2_000)
    index.stored(TENANT, Kept("displaced.kv", chat("abc").id, (chat("abc").id,), 2_000))
    (talk,) = index.conversations(TENANT)
    assert (talk.id, talk.place, talk.snapshot) == (chat("abcde").id, Place.DISK, "displaced.kv")


@pytest.mark.parametrize("used", [(1, 2), (2, 1)], ids=["used in their order", "used the other way round"])
def test_of_several_copies_the_one_that_goes_furthest_comes_back(used: tuple[int, int]) -> None:
    index = Index()
    answer(index, "abcdefg")
    index.left(TENANT)
    copies = [
        Kept(f"{letters}.kv", chat(letters).id, (chat(letters).id,), 900, at)
        for letters, at in zip(("abc", "abcde"), used, strict=True)
    ]
    index.kept(TENANT, copies)
    index.kept(TENANT, copies[::-1])
    assert [talk.snapshot for talk in index.conversations(TENANT)] == ["abcde.kv"]


def test_what_made_room_as_nobodys_is_said_to_be_lost_and_not_to_have_been_evicted() -> None:
    index = Index()
    answer(index, "abc", slot=0)
    index.pushed_out(TENANT, 1)
    assert len(index.talks(TENANT)) == 1
    index.pushed_out(TENANT, 0)
    (talk,) = index.conversations(TENANT)
    assert (talk.place, talk.slot) == (Place.COLD, None)
    assert "its slot was given to another" in talk.reason
    assert answer(index, "abcd").why is Why.SWAPPED
