"""Tenants and their needs: over it is told once, and acted on where that is wanted; a need nobody wrote is learned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core import plan, policy, watchdog
from swapper.core.commit import AlertKind
from swapper.core.conversations import Keeping
from swapper.core.spec import Spec, TenantSpec
from swapper.core.types import LeaseState
from swapper.core.watched import REST_MS, NeedFrom
from tests.support.play import GIB, MED, SAVED, SLOTS, SMALL, spec, tenant
from tests.unit.watchdog_play import Watched, held

BIG = "llama/big"
CALM = [held(77, 8000, MED)]
GROWN = [held(77, 6000, MED), held(78, 4000, MED)]


def acting(on_over: str, **traits: bool) -> Watched:
    med = replace(tenant("med", **traits), on_over=on_over)
    return Watched(spec(med, tenant("small", 4 * GIB), tenant("big", 15 * GIB)), MED)


def over(found: Watched) -> Watched:
    found.see(*GROWN)
    found.settle()
    assert found.card.overruns[MED].raised
    return found


def test_a_tenant_over_its_need_is_told_of_once_and_once_when_it_keeps_to_it_again() -> None:
    found = acting("alert")
    assert found.see(*GROWN) == []
    (alert,) = found.settle()
    assert (alert.kind, alert.data["tenant"]) == (AlertKind.OVER_NEED, MED)
    assert alert.text == (
        "llama/med takes 10,000 MiB of gpu0 since 1970-01-01 00:16:40 UTC, 1,808 MiB more than the 8,192 MiB of its "
        "vram: llama/big (15,360 MiB) fits no more beside who is there, no lease can have the whole card; raise its "
        "vram to what it takes, or lower its contexts"
    )
    assert found.see(*GROWN, held(79, 100, MED)) == []
    assert found.settle(600_000) == []
    assert found.see(held(77, 8300, MED)) == []  # within the margin, and still over
    (done,) = found.see(*CALM)
    assert (done.over, done.data["tenant"]) == (True, MED)
    assert done.text == "llama/med keeps to its need on gpu0 again, it takes 8,000 MiB"
    assert found.card.overruns == {}


def test_a_little_more_than_its_need_is_no_alarm() -> None:
    found = acting("alert")
    found.see(held(77, 9011, MED))
    assert found.settle() == []
    found.see(held(77, 9012, MED))
    assert len(found.settle()) == 1


def test_of_a_small_need_a_quarter_of_a_gib_is_a_little() -> None:
    found = Watched(spec(tenant("small", 1000)), SMALL)
    found.see(held(5, 1256, SMALL))
    assert found.settle() == []
    found.see(held(5, 1257, SMALL))
    assert len(found.settle()) == 1


def test_it_is_over_when_the_tenant_left() -> None:
    found = over(acting("alert"))
    (alert,) = found.see(states={MED: "unloaded"})
    assert alert.over


@pytest.mark.parametrize("hidden", [held(79, None, MED), held(79, 9000, line=[])])
def test_what_it_takes_is_unknown_where_a_process_of_it_may_be_hidden(hidden: dict[str, object]) -> None:
    found = acting("alert")
    found.see(*GROWN, hidden)
    assert found.settle() == []
    found = over(acting("alert"))
    assert found.see(*CALM, hidden) == []


def test_told_only_it_stays_where_it_is() -> None:
    assert not over(acting("alert")).decide()


def test_a_restart_saves_releases_loads_and_restores_it_and_nobody_else() -> None:
    found = over(acting("restart"))
    assert found.decide()
    assert (found.swap.cause, found.swap.from_, found.swap.to) == ("watchdog", (MED,), (MED,))
    found.run(until="load", drain={"slots": SLOTS}, save=SAVED)
    saved = [{"snapshot": talk.snapshot, "slot": talk.slot, **SAVED} for talk in found.swap.conversations]
    found.answer(found.pending("load"), n_slots=2, snapshots=saved)
    found.run(restore=SAVED)
    (swap,) = found.log.values()
    assert (swap.outcome, found.card.residents) == ("done", (MED,))
    steps = list(dict.fromkeys(str(record.step) for record in swap.steps))
    assert steps == ["close", "drain", "save", "release", "vacate", "load", "restore", "open"]
    assert [(talk.saved, talk.restored) for talk in swap.conversations] == [(True, True), (True, True)]


def test_it_is_done_once_in_its_rest_and_again_after_that() -> None:
    found = over(acting("restart"))
    found.decide()
    found.run()
    assert not found.decide()
    found.see(*CALM)
    found.see(*GROWN)
    assert len(found.settle()) == 1
    assert not found.decide()
    found.pass_time(REST_MS)
    assert found.decide()


@pytest.mark.parametrize("wanted_again", [True, False])
def test_one_sent_away_comes_back_only_when_it_is_asked_for(wanted_again: bool) -> None:
    found = over(acting("evict", default=True))
    found.decide()
    assert (found.swap.from_, found.swap.to) == ((MED,), ())
    found.run()
    found.see(states={MED: "unloaded"})
    found.pass_time(REST_MS + 600_000)
    found.follow()
    assert not found.decide()
    if wanted_again:
        found.demand((MED, 1, 0))
        assert found.decide()
        found.run()
        assert found.card.residents == (MED,)
        assert not found.card.overruns[MED].away


def test_one_that_came_back_is_a_default_again() -> None:
    found = over(acting("evict", default=True))
    found.decide()
    found.run()
    found.see(states={MED: "unloaded"})
    found.demand((MED, 1, 0))
    found.decide()
    found.run()
    found.see(*CALM)
    found.demand()
    found.observe({MED: "unloaded"})
    assert found.decide()
    assert found.swap.to == (MED,)


@pytest.mark.parametrize("trait", ["by_lease", "evict_never"])
def test_nothing_is_done_to_one_that_may_not_leave(trait: str) -> None:
    found = over(acting("restart"))
    kept = replace(found.spec, tenants={**found.spec.tenants, MED: replace(found.spec.tenants[MED], **{trait: True})})
    choice = policy.choose(found.world, found.spec, found.card, idle_since_ms=0)
    assert choice is not None
    assert choice.cause == policy.WATCHDOG
    assert policy._put_right(found.world, kept, found.card) is None  # pyright: ignore[reportPrivateUsage]


def test_a_lease_that_waits_goes_first() -> None:
    found = over(acting("restart"))
    found.enqueue("a")
    found.decide()
    assert found.swap.cause == "lease a"


def learning() -> Watched:
    found = Watched(unsaid(12 * GIB), MED)
    card = replace(found.card, keeping={MED: Keeping(fingerprint="one")})
    found.world = replace(found.world, cards={"gpu0": card})
    return found


def unsaid(estimated_mib: int | None = None) -> Spec:
    """What `med` needs nobody wrote."""
    med = replace(tenant("med"), need_mib=24 * GIB, takes_all=True, need_from=NeedFrom.UNKNOWN)
    made = spec(med, tenant("small", 4 * GIB), tenant("big", 15 * GIB))
    return made if estimated_mib is None else made.estimated({MED: estimated_mib})


def need(found: Watched | Spec, of: str = MED) -> tuple[int, NeedFrom]:
    one: TenantSpec = (found if isinstance(found, Spec) else found.spec).tenants[of]
    return one.need_mib, one.need_from


def test_what_nobody_knows_counts_as_the_whole_card_until_it_is_estimated() -> None:
    assert need(unsaid()) == (24 * GIB, NeedFrom.UNKNOWN)
    assert need(unsaid(9000)) == (9000, NeedFrom.ESTIMATED)
    assert need(unsaid(90_000)) == (24 * GIB, NeedFrom.ESTIMATED)
    assert need(unsaid(9000).estimated({SMALL: 1}), SMALL) == (4 * GIB, NeedFrom.DECLARED)


def test_beside_one_that_never_leaves_it_counts_as_what_remains() -> None:
    tenants = unsaid(90_000).tenants.values()
    made = spec(*tenants, replace(tenant("stays", 2 * GIB), evict_never=True), total_mib=0)
    cards = {"gpu0": replace(made.cards["gpu0"], measured=True)}
    assert need(replace(made, cards=cards).learned({"gpu0": 24 * GIB})) == (22 * GIB, NeedFrom.ESTIMATED)


def test_the_measured_peak_takes_the_place_of_the_estimate() -> None:
    found = learning()
    found.see(held(77, 7000, MED))
    assert need(found) == (12 * GIB, NeedFrom.ESTIMATED)
    assert found.settle() == []
    assert need(found) == (7040, NeedFrom.MEASURED)
    found.see(held(77, 7500, MED))
    assert need(found) == (7552, NeedFrom.MEASURED)
    found.see(held(77, 5000, MED))
    assert need(found) == (7552, NeedFrom.MEASURED)


def test_the_policy_goes_by_what_was_measured() -> None:
    found = learning()
    found.demand((BIG, 1, 0))
    choice = policy.choose(found.world, found.spec, found.card, idle_since_ms=0)
    assert choice is not None
    assert choice.leaving == (MED,)  # 12 and 15 GiB
    found.see(held(77, 7000, MED))
    found.settle()
    found.decide()
    assert found.swap.from_ == ()
    assert plan.vacate_need(found.spec, found.card, replace(found.swap, to=(MED,))) == 7040


def test_what_was_measured_outlives_a_restart_and_is_forgotten_with_the_build_or_preset() -> None:
    found = learning()
    found.see(held(77, 7000, MED))
    found.settle()
    assert need(unsaid(12 * GIB).needing(found.world.cards)) == (7040, NeedFrom.MEASURED)
    card = replace(found.card, keeping={MED: Keeping(fingerprint="two")})
    found.world = replace(found.world, cards={"gpu0": card})
    found.follow()
    assert need(found) == (7040, NeedFrom.MEASURED)  # and measured anew at once: it still serves
    assert found.card.needs[MED].fingerprint == "two"
    assert need(unsaid(12 * GIB).needing({"gpu0": replace(card, needs=learned_as("one"))}))[0] == 12 * GIB


def learned_as(fingerprint: str) -> dict[str, watchdog.Need]:
    return {MED: watchdog.Need(7040, fingerprint)}


def test_nothing_is_learned_while_it_comes_or_goes_or_of_what_is_declared() -> None:
    found = learning()
    found.see(held(77, 7000, MED), states={MED: "loading"})
    found.settle(60_000)
    assert found.card.needs == {}
    found.see(held(77, 7000, MED))
    found.enqueue("a")
    found.decide()
    found.settle()
    assert found.card.needs == {}
    declared = acting("alert")
    declared.see(*CALM)
    declared.settle()
    assert declared.card.needs == {}


def test_one_that_is_not_declared_is_not_over_its_need() -> None:
    found = learning()
    found.see(held(77, 20_000, MED))
    assert found.settle() == []
    assert found.settle() == []


def test_where_it_ran_out_of_memory_it_needs_more_than_what_was_free() -> None:
    found = Watched(unsaid(8 * GIB))
    found.demand((MED, 1, 0))
    found.decide()
    found.run(until="vacate")
    found.answer(found.pending("vacate"), free_mib=9000)
    for _ in range(2):
        found.answer(found.pending("load"), ok=False, detail="out of memory", out_of_memory=True)
    found.follow()
    assert need(found) == (9001, NeedFrom.MEASURED)
    assert found.card.failed[MED].count == 1


@pytest.mark.parametrize(("free_mib", "becomes"), [(30_000, 24 * GIB), (7000, 8 * GIB)])
def test_it_is_never_more_than_the_card_and_never_less_than_before(free_mib: int, becomes: int) -> None:
    found = Watched(unsaid(8 * GIB))
    found.demand((MED, 1, 0))
    found.decide()
    found.run(until="vacate")
    found.answer(found.pending("vacate"), free_mib=free_mib)
    for _ in range(2):
        found.answer(found.pending("load"), ok=False, detail="out of memory", out_of_memory=True)
    found.follow()
    assert need(found)[0] == becomes


def test_what_was_declared_stays_whatever_happens() -> None:
    found = Watched(spec(tenant("med")))
    found.demand((MED, 1, 0))
    found.decide()
    found.run(until="vacate")
    found.answer(found.pending("vacate"), free_mib=9000)
    for _ in range(2):
        found.answer(found.pending("load"), ok=False, detail="out of memory", out_of_memory=True)
    found.follow()
    assert (need(found), found.card.needs) == ((8 * GIB, NeedFrom.DECLARED), {})


def test_a_lease_of_all_is_granted_beside_a_tenant_that_was_learned() -> None:
    found = learning()
    found.see(held(77, 7000, MED))
    found.settle()
    found.enqueue("a")
    found.decide()
    found.run()
    assert found.lease("a").state is LeaseState.GRANTED
