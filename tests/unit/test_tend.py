"""A conversation on disk that is asked for comes back while its model serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import tend
from swapper.core.conversations import Keeping
from swapper.core.orders import Report
from swapper.core.types import Gate
from tests.support.play import MED, Play, spec, tenant

TALK: dict[str, object] = {"id": "a" * 32, "links": [], "tokens": 50, "used_ms": 1, "slot": 1}
UNSEEN: dict[str, object] = {**TALK, "id": "b" * 32, "slot": None}
"""Which slot holds it nobody saw."""
WANTED: dict[str, object] = {"snapshot": "med.1.c2.kv", "tokens": 900, "talks": [TALK, UNSEEN]}


def serving() -> Play:
    play = Play(spec(tenant("med")), MED)
    play.world = replace(play.world, gates={MED: Gate(3, open=True)})
    return play


def ask(play: Play, data: dict[str, object] = WANTED) -> None:
    report = Report("gateway:g1", "gpu0", MED, 0, 0, "wanted", "ok", data=data)
    commit = tend.on_wanted(play.world, play.spec, report, swap_id="sw_9", token=999)
    assert commit is not None
    play.apply(commit)


def test_the_agent_puts_it_where_it_pushes_out_least_and_the_gateways_are_told_once_it_is_there() -> None:
    play = serving()
    ask(play)
    (command,) = play.swap.pending
    assert (command.executor, command.verb, command.token) == ("agent:main", "restore", 999)
    assert command.args["slot"] == -1
    assert command.args["displaced"] == "llama-med.3e7.d.kv"
    assert command.args["talks"] == [TALK, UNSEEN]
    made_room = {"snapshot": "llama-med.3e7.d.kv", "slot": 1, "tokens": 50, "bytes": 7, "id": "a" * 32}
    play.answer(command, slot=1, tokens=900, displaced=made_room)
    assert play.card.swap is None
    (word,) = play.commits[-1].commands
    assert (word.executor, word.verb, word.token, word.tenant) == ("gateway:g1", "placed", 0, MED)
    assert (word.args["ok"], word.args["slot"], word.args["tokens"]) == (True, 1, 900)
    assert [one["snapshot"] for one in word.args["kept"]] == ["llama-med.3e7.d.kv"]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
    assert play.card.residents == (MED,)
    assert play.world.gates[MED] == Gate(3, open=True)


def test_one_that_is_on_its_way_is_not_brought_twice() -> None:
    """Two gateways may want it, and two coordinators may hear the same one."""
    play = serving()
    ask(play)
    report = Report("gateway:g2", "gpu0", MED, 0, 0, "wanted", "ok", data=WANTED)
    assert tend.on_wanted(play.world, play.spec, report, swap_id="sw_10", token=1_000) is None


def test_one_that_cannot_be_restored_is_answered_all_the_same() -> None:
    play = serving()
    ask(play)
    play.answer(play.pending("restore"), ok=False, detail="its file is gone")
    (word,) = play.commits[-1].commands
    assert (word.args["ok"], word.args["detail"]) == (False, "its file is gone")
    assert play.card.swap is None


def test_during_a_handover_nothing_is_brought_back_and_the_gateways_are_told_at_once() -> None:
    play = serving()
    play.enqueue("a")
    play.decide()
    ask(play)
    assert play.commits[-1].commands[-1].args["detail"] == "the card is being handed over"
    assert play.swap.lease == "a"


def test_what_a_handover_was_for_has_to_wait_for_its_last_step_only() -> None:
    """The gate is open, and a call was let in by it, before the coordinator has heard so."""
    play = Play(spec(tenant("med")))
    play.demand((MED, 1, 0))
    play.decide()
    for step, again in (("load", False), ("open", True)):
        play.run(until=step)
        ask(play)
        word = play.commits[-1].commands[-1]
        assert (word.verb, word.args["ok"], word.args["again"]) == ("placed", False, again)


def test_a_lease_waits_only_until_the_conversation_is_back() -> None:
    play = serving()
    ask(play)
    play.enqueue("a")
    assert not play.decide()
    play.answer(play.pending("restore"), slot=0, tokens=900)
    assert play.decide()
    assert play.swap.lease == "a"


HYBRID = Keeping(("rewind", "replay"), "one")
USED: dict[str, object] = {**TALK, "tokens": 700, "recallable": True}
"""It was used since it came, so that it ends with its answer."""


def hybrid(*talks: dict[str, object]) -> Play:
    """A model whose conversations are rewound before a save; one that lies on disk is wanted."""
    play = serving()
    card = replace(play.card, keeping={MED: HYBRID})
    play.world = replace(play.world, cards={"gpu0": card})
    ask(play, {**WANTED, "talks": list(talks)})
    return play


def leaves(play: Play, name: str, tokens: int = 700, slot: int = 1) -> None:
    """The agent says who would have to make room."""
    play.answer(play.pending("restore"), leaves={"slot": slot, "tokens": tokens, "id": name})


def test_of_a_hybrid_model_what_would_make_room_is_recalled_first_and_leaves_as_it_stands_then() -> None:
    play = hybrid(USED)
    assert play.pending("restore").args["tells"] is True
    leaves(play, "a" * 32)
    (command,) = play.swap.pending
    assert (command.executor, command.verb, command.args["conversation"]) == ("gateway:g1", "recall", "a" * 32)
    assert (command.args["limit_ms"], command.args["beside"]) == (tend.REWIND_MS, True)
    assert command.args["for"] == "med.1.c2.kv"
    play.answer(command, slot=1, tokens=692, cache_n=600, prompt_n=92)
    (command,) = play.swap.pending
    assert (command.verb, command.args["displaced"]) == ("restore", "llama-med.3e7.d.kv")
    assert (command.args["takes"], command.args["strategy"]) == ({"slot": 1, "tokens": 692}, "rewind")
    assert command.args["talks"] == [{**TALK, "tokens": 692}]
    play.answer(
        command, slot=1, tokens=900, displaced={"snapshot": "llama-med.3e7.d.kv", "tokens": 692, "id": "a" * 32}
    )
    assert play.card.swap is None
    assert [(talk.head, talk.tokens) for talk in play.card.displaced] == [("a" * 32, 692)]


def test_of_a_dense_model_nobody_is_asked_before() -> None:
    play = serving()
    ask(play)
    assert "tells" not in play.pending("restore").args


def test_one_that_was_rewound_and_saved_already_leaves_as_it_stands() -> None:
    play = hybrid({**USED, "restored": True, "saved_ms": 5})
    leaves(play, "a" * 32)
    (command,) = play.swap.pending
    assert (command.verb, command.args["strategy"]) == ("restore", "rewind")
    assert command.args["takes"] == {"slot": 1, "tokens": 700}


@pytest.mark.parametrize(
    ("talk", "name"),
    [
        pytest.param(USED, "", id="nobody knows whose it is"),
        pytest.param({**USED, "recallable": False}, "a" * 32, id="its text is not kept"),
    ],
)
def test_what_cannot_be_recalled_leaves_as_it_lies(talk: dict[str, object], name: str) -> None:
    play = hybrid(talk)
    leaves(play, name)
    (command,) = play.swap.pending
    assert (command.verb, command.args["strategy"], command.args["takes"]) == (
        "restore",
        "slots",
        {"slot": 1, "tokens": 700},
    )


def test_one_whose_recall_fails_is_not_recalled_again_and_leaves_as_it_lies() -> None:
    play = hybrid(USED)
    leaves(play, "a" * 32)
    play.answer(play.pending("recall"), ok=False, detail="it was not in the server's cache any more", evicted=True)
    leaves(play, "a" * 32)
    (command,) = play.swap.pending
    assert (command.verb, command.args["strategy"]) == ("restore", "slots")


def test_a_gateway_that_dies_over_the_recall_holds_nothing_up_and_one_that_lives_is_asked() -> None:
    play = hybrid(USED)
    leaves(play, "a" * 32)
    play.gateways("g2")
    play.decide()
    assert play.verbs() == ["restore"]
    leaves(play, "a" * 32)
    assert play.pending("recall").executor == "gateway:g2"
    play.gateways()
    play.decide()
    leaves(play, "a" * 32)
    play.answer(play.pending("restore"), slot=1, tokens=900)
    assert play.card.swap is None


def test_while_whatever_would_make_room_is_gone_on_with_it_is_not_looked_for_for_ever() -> None:
    play = hybrid(*({**USED, "id": f"{nth}" * 32} for nth in range(9)))
    for nth in range(9):
        if "tells" not in play.pending("restore").args:
            break
        leaves(play, f"{nth}" * 32, slot=nth % 2)
        play.answer(play.pending("recall"), slot=nth % 2, tokens=692)
    assert "tells" not in play.pending("restore").args
    play.answer(play.pending("restore"), slot=1, tokens=900)
    assert play.card.swap is None


def test_what_made_room_is_remembered_until_it_is_back_or_its_model_is_loaded_anew() -> None:
    play = serving()
    ask(play)
    made_room = {"snapshot": "llama-med.3e7.d.kv", "tokens": 50, "id": "a" * 32, "links": ["a" * 32], "used_ms": 7}
    play.answer(play.pending("restore"), slot=1, tokens=900, displaced=made_room)
    (talk,) = play.card.displaced
    assert (talk.tenant, talk.snapshot, talk.head, talk.links, talk.used_ms) == (
        MED,
        "llama-med.3e7.d.kv",
        "a" * 32,
        ("a" * 32,),
        7,
    )
    ask(play, {**WANTED, "snapshot": "llama-med.3e7.d.kv"})
    play.answer(play.pending("restore"), slot=1, tokens=50, displaced={**made_room, "snapshot": "other.kv"})
    assert [talk.snapshot for talk in play.card.displaced] == ["other.kv"]
    play.enqueue("a")
    play.decide()
    play.run()
    play.end("a")
    play.decide()
    play.run(load={"n_slots": 1, "snapshots": []})
    assert play.card.residents == (MED,)
    assert play.card.displaced == ()
