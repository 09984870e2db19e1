"""Whose conversation is in a slot that must be given away: told for certain, or not at all."""

from __future__ import annotations

from swapper.snapshots.manifest import Fingerprint, GgufIdentity, Manifest
from workers.backend import Talk
from workers.llama.http import Slot
from workers.llama.seats import Arrived, Run, in_use, whose

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
