"""What was read twice, and why: each cause is told apart, and what cannot be avoided is not counted."""

from __future__ import annotations

import pytest

from swapper.snapshots.conversation import Kept, Relation
from swapper.snapshots.index import Index
from swapper.snapshots.reread import ADVISE_TOKENS, SLACK_TOKENS, Counts, Why, advise
from tests.unit.index_doubles import PER_MESSAGE, TENANT, answer, chat

M = PER_MESSAGE


def test_a_conversation_that_was_reused_or_is_new_costs_nothing() -> None:
    index = Index()
    first, next_turn, again = answer(index, "abc"), answer(index, "abcde", 3 * M), answer(index, "abcde", 5 * M - 1)
    assert [account.reread for account in (first, next_turn, again)] == [0, 0, 0]
    assert (first.processed, next_turn.cached, next_turn.processed) == (3 * M, 3 * M, 2 * M)
    assert again.relation is Relation.SAME


def test_what_a_template_and_the_last_token_cost_is_not_counted_and_one_token_more_is() -> None:
    for missing, counted in ((SLACK_TOKENS, 0), (SLACK_TOKENS + 1, SLACK_TOKENS + 1)):
        index = Index()
        answer(index, "abc")
        assert answer(index, "abcde", 3 * M - missing).reread == counted


def test_what_was_in_the_server_and_is_read_anew_was_evicted() -> None:
    index = Index()
    answer(index, "abc")
    account = answer(index, "abcde", 10)
    assert (account.reread, account.why) == (3 * M - 10, Why.EVICTED)


def test_what_stood_in_another_slot_is_told_apart_where_both_slots_are_known() -> None:
    index = Index()
    answer(index, "abc", slot=0)
    assert answer(index, "abcde", 10, slot=1).why is Why.SLOT
    assert answer(index, "abcdefg", 10, slot=1).why is Why.EVICTED
    assert answer(index, "abcdefghi", 10).why is Why.EVICTED


def test_a_slot_that_is_found_out_later_corrects_the_cause() -> None:
    index = Index()
    answer(index, "abc")
    index.stands(TENANT, chat("abc").id, 0)
    answer(index, "abcde", 10)
    for _ in range(2):
        index.stands(TENANT, chat("abcde").id, 1)
    assert index.counts(TENANT).reread == {Why.EVICTED: 0, Why.SLOT: 3 * M - 10}
    answer(index, "abcdefg", 10)
    index.stands(TENANT, chat("abcdefg").id, 1)
    assert index.counts(TENANT).reread == {Why.EVICTED: 5 * M - 10, Why.SLOT: 3 * M - 10}


def test_a_slot_that_another_conversation_took_is_no_longer_where_the_first_one_stands() -> None:
    index = Index()
    answer(index, "abc", slot=0)
    answer(index, "xyz", slot=0)
    assert answer(index, "abcde", 10, slot=1).why is Why.EVICTED


def test_what_was_reused_for_the_larger_part_was_there_and_the_model_went_back_to_a_checkpoint() -> None:
    index = Index()
    answer(index, "abc")
    account = answer(index, "abcde", 2 * M)
    assert (account.reread, account.why) == (M, Why.CHECKPOINT)


@pytest.mark.parametrize("letters", ["abcdE", "abCde"])
def test_an_edited_history_is_read_again_as_far_as_it_is_shared(letters: str) -> None:
    index = Index()
    answer(index, "abcde")
    account = answer(index, letters, 0)
    shared = index_of_difference("abcde", letters)
    assert account.why is Why.EDITED
    assert account.reread == pytest.approx(shared * M, rel=0.1)
    assert account.reread <= shared * M + M // 10


def index_of_difference(one: str, other: str) -> int:
    return next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])


def test_after_a_swap_what_is_read_anew_is_the_swaps_whether_it_came_back_or_not() -> None:
    index = Index()
    for letters in ("abc", "mno", "xyz"):
        answer(index, letters)
    index.left(TENANT)
    index.placed(TENANT, chat("abc").id, 0)
    index.kept(TENANT, [Kept("one.kv", chat("mno").id, (chat("mno").id,), 3 * M)])
    assert [answer(index, letters, 0, slot=0).why for letters in ("abcd", "mnop", "xyz")] == [Why.SWAPPED] * 3
    assert answer(index, "abcde", 0).why is Why.EVICTED


def test_a_conversation_of_which_only_a_manifest_tells_was_read_before_as_far_as_it_was_saved() -> None:
    index = Index()
    index.kept(TENANT, [Kept("one.kv", chat("abc").id, tuple(one.hex() for one in chat("abc").links), 2_900)])
    assert answer(index, "abX").reread == 0
    index.kept(TENANT, [Kept("one.kv", chat("xyz").id, (chat("xyz").id,), 2_900)])
    account = answer(index, "xyzq")
    assert (account.reread, account.why) == (2_900, Why.SWAPPED)


def test_an_answer_without_figures_costs_what_nobody_knows() -> None:
    index = Index()
    answer(index, "abc")
    account = index.answered(TENANT, chat("abcde"), None, None, None, None, None, 1)
    assert (account.relation, account.cached, account.processed, account.reread) == (Relation.EXTENDS, 0, 0, 0)
    assert answer(index, "abcdefg").reread == 0


def test_a_recall_after_a_swap_counts_as_read_again_and_its_hits_are_nobodys() -> None:
    index = Index()
    answer(index, "abc")
    index.left(TENANT)
    index.recalled(TENANT, chat("abc").id, 0, 2_990, 1)
    assert index.counts(TENANT) == Counts(0, 3 * M + 2_990, {Why.SWAPPED: 2_990})
    index.recalled(TENANT, chat("abc").id, 2_989, 1, 1)
    assert index.counts(TENANT) == Counts(0, 3 * M + 2_991, {Why.SWAPPED: 2_990})


def test_counts_are_the_sums_of_a_tenants_accounts_by_cause() -> None:
    index = Index()
    for letters, cached in (("abc", 0), ("abcde", 10), ("abcdefg", 10), ("abcdefG", 0)):
        answer(index, letters, cached)
    counts = index.counts(TENANT)
    assert (counts.cached, counts.processed) == (20, 22 * M - 20)
    assert counts.reread[Why.EVICTED] == 8 * M - 20
    assert set(counts.reread) == {Why.EVICTED, Why.EDITED}
    assert index.counts("nobody") == Counts()


def test_the_advice_names_the_setting_that_would_spare_most() -> None:
    evicted = advise(Counts(0, 10_000, {Why.EVICTED: 2_000, Why.SLOT: 500}), 2)
    assert evicted is not None
    assert "2,500 of 10,000 prompt tokens (25%)" in evicted
    assert "raise --cache-ram, or parallel (now 2)" in evicted
    slot = advise(Counts(0, 10_000, {Why.EVICTED: 500, Why.SLOT: 2_000}), None)
    assert slot is not None
    assert "raise parallel, or --cache-ram" in slot


@pytest.mark.parametrize(
    "counts",
    [
        Counts(),
        Counts(0, 10_000, {Why.EVICTED: 999}),
        Counts(0, 10, {Why.EVICTED: 10}),
        Counts(ADVISE_TOKENS * 20, 0, {Why.EVICTED: ADVISE_TOKENS}),
        Counts(0, 10_000, {Why.EDITED: 9_000, Why.SWAPPED: 9_000}),
    ],
)
def test_there_is_no_advice_where_little_would_be_spared(counts: Counts) -> None:
    assert advise(counts, 2) is None


def test_the_index_gives_its_own_advice() -> None:
    index = Index()
    answer(index, "abc")
    assert index.advice(TENANT, 2) is None
    answer(index, "abcde", 10)
    assert "--cache-ram" in (index.advice(TENANT, 2) or "")
