"""Who is foreign on a measured card is told once, with what fits no more for it, and once when it is over."""

from __future__ import annotations

from dataclasses import replace

from swapper.core.commit import AlertKind
from swapper.core.explain import explain_lease
from swapper.core.types import Departed
from swapper.core.watchdog import LEFT_MS, SETTLE_MS
from tests.support.play import GIB, MED, spec, tenant
from tests.unit.watchdog_play import Watched, held

LIBRARY = held(4242, 10_700, containers=["c" * 64])


def card(*residents: str) -> Watched:
    return Watched(spec(tenant("med"), tenant("small", 4 * GIB), tenant("big", 18 * GIB)), *residents)


def test_a_process_that_is_nobody_s_is_told_of_once_with_all_that_a_person_needs() -> None:
    found = card(MED)
    assert found.see(held(77, 8000, MED), LIBRARY) == []
    (alert,) = found.settle()
    assert alert.kind is AlertKind.FOREIGN_VRAM
    assert alert.text == (
        "pid 4242 (python in container cccccccccccc) holds 10,700 MiB of gpu0 since 1970-01-01 00:16:40 UTC and is "
        "neither a tenant's nor a lease's: llama/big (18,432 MiB) fits no more at all, no lease can have the whole "
        "card; end it, run it under a lease (swapper run), or make it a tenant"
    )
    assert found.see(held(77, 8000, MED), LIBRARY) == []
    assert found.settle(600_000) == []


def test_who_fits_only_beside_fewer_is_named_as_well() -> None:
    found = card(MED)
    found.see(held(77, 8000, MED), held(5, 13_000))
    (alert,) = found.settle()
    assert "llama/small (4,096 MiB) fits no more beside who is there" in alert.text


def test_it_is_over_once_it_is_gone_and_begins_anew_if_it_comes_again() -> None:
    found = card()
    found.see(LIBRARY)
    (raised,) = found.settle()
    (over,) = found.see()
    assert (over.over, over.kind) == (True, AlertKind.FOREIGN_VRAM)
    assert over.data["holders"] == raised.data["holders"] == ["pid 4242 (python in container cccccccccccc)"]
    assert found.card.intruders == ()
    found.see(LIBRARY)
    assert len(found.settle()) == 1


def test_what_it_holds_may_go_up_and_down_a_little_without_a_word() -> None:
    found = card()
    found.see(held(5, 300))
    assert len(found.settle()) == 1
    assert found.see(held(5, 200)) == []
    assert found.see(held(5, 300)) == []
    (over,) = found.see(held(5, 100))
    assert over.over


def test_after_a_restart_what_was_told_is_not_told_again() -> None:
    found = card()
    found.see(LIBRARY)
    found.settle()
    again = card()
    again.world = found.world
    assert again.see(LIBRARY) == []
    assert again.settle() == []
    (over,) = again.see()
    assert over.over


def test_one_look_is_not_enough() -> None:
    found = card()
    found.see(LIBRARY)
    assert found.settle(SETTLE_MS - 1) == []
    assert found.see() == []
    assert found.settle() == []


def test_a_child_that_is_nobody_s_until_it_is_seen_loaded_is_no_alarm() -> None:
    found = card()
    loading = {MED: "loading"}
    found.see(held(5, 9000), states=loading)
    assert found.settle(60_000) == []
    assert found.see(held(5, 9000), states=loading) == []
    assert found.see(held(5, 9000, MED), states={MED: "loaded"}) == []
    assert found.settle(60_000) == []


def test_after_a_load_it_needs_two_looks_again() -> None:
    found = card()
    found.see(held(5, 9000), states={MED: "loading"})
    found.pass_time(60_000)
    assert found.see(held(5, 9000), states={MED: "loaded"}) == []
    assert len(found.settle()) == 1


def test_what_the_reserve_is_for_is_no_alarm() -> None:
    found = card()
    found.reserve(1024)
    found.see(held(5, 700), held(6, 300))
    assert found.settle() == []
    alerts = found.see(held(5, 700), held(6, 400))
    assert [alert.data["holders"] for alert in alerts] == [["pid 5 (python)"], ["pid 6 (python)"]]


def test_a_little_is_no_alarm() -> None:
    found = card()
    found.see(held(5, 256))
    assert found.settle() == []


def test_what_cannot_be_read_is_unknown_and_neither_foreign_nor_over() -> None:
    found = card()
    found.see(LIBRARY)
    found.pass_time(1000)
    assert found.unread() == []
    assert found.settle(60_000) == []
    assert found.see(LIBRARY) == []  # it was not seen for two looks in a row
    assert len(found.settle()) == 1
    assert found.unread() == []
    assert len(found.card.intruders) == 1


def test_of_what_cannot_be_seen_or_measured_nothing_is_said() -> None:
    found = card()
    found.see(held(5, 9000, line=[]), held(6, None))
    assert found.settle() == []
    found.see(held(5, 9000), note="2 processes of other users cannot be looked into")
    assert found.settle() == []


def test_a_process_of_a_lease_and_its_children_is_the_lease_s() -> None:
    found = card()
    found.enqueue("part", vram_mib=12 * GIB, holder_pid=12, holder_started=7)
    found.decide()
    found.run()
    found.see(held(12, 5000), held(13, 5000, line=[[13, 9], [12, 7]]), held(14, 5000, line=[[14, 9], [12, 8]]))
    (alert,) = found.settle()
    assert alert.text.startswith("pid 14 ")


def test_of_a_lease_that_names_no_process_is_what_is_nobody_else_s_while_it_lasts() -> None:
    found = card()
    found.enqueue("part", vram_mib=12 * GIB)
    found.decide()
    found.run()
    (hold,) = found.card.holds
    found.see(held(12, 5000))
    assert found.settle() == []
    found.world = replace(found.world, cards={"gpu0": replace(found.card, holds=(replace(hold, granted=False),))})
    (alert,) = found.follow()
    assert alert.text.startswith("pid 12 ")


def test_what_was_foreign_before_such_a_lease_is_not_its_own() -> None:
    found = card()
    found.see(held(12, 5000))
    (alert,) = found.settle()
    found.enqueue("part", vram_mib=12 * GIB)
    found.decide()
    found.run()
    found.see(held(12, 5000), held(13, 5000, line=[[13, 9]]))
    assert found.settle() == []
    assert [one.pid for one in found.card.intruders] == [12]
    assert alert.text.startswith("pid 12 ")


def test_neither_is_one_that_a_lease_named_that_is_over_and_that_is_waited_for() -> None:
    found = card()
    gone = Departed("ls", "encode", 12, 0, 7)
    found.world = replace(found.world, cards={"gpu0": replace(found.card, departed=(gone,))})
    found.see(held(12, 9000))
    assert found.settle() == []


def test_what_a_tenant_left_behind_gets_its_time_to_go_and_is_then_told_as_that() -> None:
    found = card(MED)
    found.see(held(5, 9000, MED))
    found.see(held(5, 9000), states={MED: "unloaded"})
    assert found.settle() == []
    (alert,) = found.settle(LEFT_MS)
    assert "was left behind by llama/med" in alert.text


def test_a_lease_that_waits_for_the_proof_is_told_who_is_in_the_way() -> None:
    found = card(MED)
    found.enqueue("a")
    found.decide()
    found.run(until="vacate")
    found.see(LIBRARY, states={MED: "unloaded"})
    assert len(found.settle()) == 1
    said = explain_lease(found.world, found.spec, found.lease("a"), None)
    assert said == (
        "preparing: the VRAM is being proved free on gpu0, beside pid 4242 (python in container cccccccccccc), "
        "which holds 10,700 MiB and is foreign"
    )


def test_while_a_swap_loads_nobody_is_called_foreign() -> None:
    found = card()
    found.demand((MED, 1, 0))
    found.decide()
    found.run(until="load")
    found.see(held(5, 9000), states={MED: "unloaded"})
    assert found.settle(60_000) == []
