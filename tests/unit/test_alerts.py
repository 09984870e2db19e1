"""What a person is alerted to, by kind: a fault and its end, what came back cold, what was not loaded or is gone."""

from __future__ import annotations

from swapper.core.commit import Alert, AlertKind
from tests.support.play import GIB, MED, SMALL, Play, granted, offers, spec, tenant


def alerts(play: Play) -> list[Alert]:
    return [alert for commit in play.commits for alert in commit.alerts]


def test_a_fault_names_its_holders_and_its_end_is_an_alert_of_the_same_kind() -> None:
    play = Play(spec(tenant("med")), MED)
    play.enqueue("a")
    play.decide()
    play.run(until="vacate")
    play.answer(play.pending("vacate"), ok=False, free_mib=20 * GIB, holders=["pid 4711 python"])
    (raised,) = alerts(play)
    assert (raised.kind, raised.over, raised.data["holders"]) == (AlertKind.FAULT, False, ["pid 4711 python"])
    assert not play.observe({MED: "unloaded"}, free_mib=1 * GIB)
    play.decide()
    play.run()
    assert play.observe({MED: "loaded"}, free_mib=16 * GIB)
    ended = alerts(play)[-1]
    assert ended == Alert("gpu0", "card gpu0 is free again", kind=AlertKind.FAULT, over=True)


def back(play: Play, *, ok: bool) -> None:
    """The lease is given back, the model comes back, and each of its restores ends as told."""
    play.end("a")
    play.decide()
    play.run(until="restore", load={"snapshots": offers(play), "n_slots": 4})
    while play.card.swap is not None and play.verbs() == ["restore"]:
        play.answer(play.pending("restore"), ok=ok, detail=None if ok else "saved under another build")
    play.run()


def test_conversations_that_could_not_be_restored_are_one_alert_with_the_reason() -> None:
    play = granted()
    count = len(offers(play))
    back(play, ok=False)
    (cold,) = alerts(play)
    assert (cold.kind, cold.data) == (AlertKind.COLD, {"tenant": MED})
    assert cold.text == f"{count} conversations of {MED} came back cold: saved under another build"


def test_conversations_that_were_restored_are_none() -> None:
    play = granted()
    back(play, ok=True)
    assert alerts(play) == []


def test_a_model_that_cannot_be_loaded_and_one_that_is_gone_are_told_by_kind_and_tenant() -> None:
    play = Play(spec(tenant("med", need_mib=20 * GIB), tenant("small")), MED)
    play.demand((SMALL, 1, 0))
    play.decide()
    play.run(until="load")
    for _ in range(2):  # it is tried once more
        play.answer(play.pending("load"), ok=False, detail="out of memory")
    assert [(a.kind, a.data["tenant"]) for a in alerts(play)] == [(AlertKind.NOT_LOADED, SMALL)]
    lost = Play(spec(tenant("med")), MED)
    lost.observe({MED: "unloaded"})
    assert [(a.kind, a.data["tenant"]) for a in alerts(lost)] == [(AlertKind.GONE, MED)]
