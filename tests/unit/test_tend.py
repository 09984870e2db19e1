"""A conversation on disk that is asked for comes back while its model serves."""

from __future__ import annotations

from dataclasses import replace

from swapper.core import tend
from swapper.core.types import Gate, Report
from tests.support.play import MED, Play, spec, tenant

TALK: dict[str, object] = {"id": "a" * 32, "links": [], "tokens": 50, "used_ms": 1, "slot": 1}
UNSEEN: dict[str, object] = {**TALK, "id": "b" * 32, "slot": None}
"""Which slot holds it nobody saw."""
WANTED: dict[str, object] = {"snapshot": "med.1.c2.kv", "tokens": 900, "talks": [TALK, UNSEEN]}


def serving() -> Play:
    play = Play(spec(tenant("med")), MED)
    play.world = replace(play.world, gates={MED: Gate(3, open=True)})
    return play


def ask(play: Play) -> None:
    report = Report("gateway:g1", "gpu0", MED, 0, 0, "wanted", "ok", data=WANTED)
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


def test_a_lease_waits_only_until_the_conversation_is_back() -> None:
    play = serving()
    ask(play)
    play.enqueue("a")
    assert not play.decide()
    play.answer(play.pending("restore"), slot=0, tokens=900)
    assert play.decide()
    assert play.swap.lease == "a"
