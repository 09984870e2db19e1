"""Whose conversation is in a slot that must be given away: told for certain, or not at all."""

from __future__ import annotations

from swapper.snapshots.manifest import Fingerprint, GgufIdentity, Manifest
from workers.backend import Talk
from workers.llama.http import Slot
from workers.llama.seats import Arrived, Run, given_away, in_use, whose

FINGERPRINT = Fingerprint("alpha", GgufIdentity("/m.gguf"), "b1", 4096, 2, kv_unified=False)


def line(nth: int, tokens: int | None, task: int | None = None) -> Slot:
    return Slot(id=nth, n_ctx=4096, is_processing=False, id_task=task, n_prompt_tokens=tokens)


def came(name: str, tokens: int, task: int = -1) -> Arrived:
    return Arrived(Manifest(f"{name}.kv", "llama/alpha", FINGERPRINT, 0, tokens, 1, saved_ms=1, id=name), task, -1)


def run(**arrived: Arrived) -> Run:
    return Run("1", None, ours=True, arrived={int(slot[1:]): one for slot, one in arrived.items()})


def test_it_is_the_one_conversation_of_that_length() -> None:
    slots = [line(0, 500, 7), line(1, 300, 9)]
    talks = (Talk("long", tokens=500), Talk("short", tokens=300))
    found = whose(run(), slots, slots[1], 300, talks)
    assert found is not None
    assert found.id == "short"


def test_two_of_one_length_are_not_guessed_between() -> None:
    slots = [line(0, 500, 7), line(1, 300, 9)]
    assert whose(run(), slots, slots[0], 500, (Talk("a", tokens=500), Talk("b", tokens=500))) is None


def test_one_that_was_seen_in_another_slot_is_not_in_this_one() -> None:
    slots = [line(0, 500, 7), line(1, 300, 9)]
    assert whose(run(), slots, slots[0], 500, (Talk("there", tokens=500, slot=1),)) is None


def test_of_several_of_one_length_it_is_the_one_that_was_seen_here() -> None:
    slots = [line(0, 500, 7), line(1, 500, 9)]
    talks = (Talk("there", tokens=500, slot=1), Talk("here", tokens=500, slot=0))
    assert whose(run(), slots, slots[0], 500, talks) == talks[1]


def test_where_another_slot_holds_as_many_the_only_one_known_may_be_there() -> None:
    slots = [line(0, 500, 7), line(1, 500, 9)]
    assert whose(run(), slots, slots[0], 500, (Talk("either", tokens=500),)) is None


def test_one_that_lies_as_it_came_in_another_slot_is_there() -> None:
    slots = [line(0, 500, 7), line(1, None)]
    rewound = came("kept", 480)
    assert whose(run(_1=rewound), slots, slots[0], 500, (Talk("kept", tokens=500),)) is None


def test_what_lies_as_it_came_is_its_manifests_whoever_else_is_as_long() -> None:
    slots = [line(0, None), line(1, 300, 9)]
    talks = (Talk("another", tokens=500),)
    found = whose(run(_0=came("kept", 500)), slots, slots[0], 500, talks)
    assert found is not None
    assert found.id == "kept"
    assert whose(run(_0=came("", 500)), slots, slots[0], 500, talks) is None, "nobody knew it when it was saved"


def test_what_went_on_since_it_came_is_no_longer_its_manifests() -> None:
    slots = [line(0, 520, 8), line(1, 300, 9)]
    found = whose(run(_0=came("before", 500)), slots, slots[0], 520, (Talk("after", tokens=520),))
    assert found is not None
    assert found.id == "after"


def test_a_slot_in_which_something_ran_since_a_conversation_came_is_said_to_have_gone_on() -> None:
    slots = [line(0, None), line(1, 500, 7), line(2, 300, 9), line(3, 200, 2)]
    there = run(_0=came("a", 100), _1=came("b", 500, task=7), _2=came("c", 300, task=4))
    assert [use.gone_on for use in in_use(there, slots)] == [False, False, True, False]


def test_of_two_of_one_length_the_one_that_is_seen_elsewhere_is_no_doubt_about_the_other() -> None:
    slots = [line(0, 500, 7), line(1, 500, 9)]
    talks = (Talk("there", tokens=500, slot=1), Talk("the other", tokens=500))
    assert whose(run(), slots, slots[0], 500, talks) == talks[1]


def test_what_nobody_can_name_makes_room_last_however_long_it_was_not_used() -> None:
    slots = [line(0, 500, 7), line(1, 300, 9)]
    known = (Talk("short", tokens=300),)
    assert given_away(run(), slots, known) == slots[1]
    assert given_away(run(), slots, (*known, Talk("long", tokens=500))) == slots[0]
    assert given_away(run(), slots) == slots[0], "of two that nobody can name the one that was used before the other"


def test_what_is_read_again_in_no_time_makes_room_whoever_s_it_is() -> None:
    slots = [line(0, 60, 7), line(1, 300, 9)]
    assert given_away(run(), slots, (Talk("long", tokens=300),)) == slots[0]


def test_what_an_earlier_process_brought_back_and_nobody_has_used_is_known_by_its_slot() -> None:
    adopted = Run("1", None)
    slots = [line(0, None), line(1, 300, 9)]
    known = (Talk("came", tokens=500, slot=0), Talk("used", tokens=300))
    assert given_away(adopted, slots, known) == slots[0]
    assert given_away(adopted, slots, known[1:]) == slots[1]


def test_what_a_call_is_about_to_use_leaves_no_sooner_than_what_nobody_can_name() -> None:
    slots = [line(0, 500, 7), line(1, None)]
    wanted = Arrived(came("wanted", 300).manifest, -1, after=8)
    assert given_away(run(_1=wanted), slots) == slots[0]
    assert given_away(run(_1=came("kept", 300)), slots) == slots[1]
