"""What a lease that waits is told of the holder it waits for: what ends that one, or what is still waited for."""

from __future__ import annotations

from dataclasses import replace

from swapper.core.explain import explain_demand, explain_lease
from swapper.core.types import LeaseState
from tests.support.play import GIB, MED, Play, granted, spec, tenant


def said(play: Play, lease: str = "b") -> str:
    return explain_lease(play.world, play.spec, play.lease(lease), 1)


def behind(play: Play) -> Play:
    """The lease `b` waits behind whoever holds the card."""
    play.enqueue("b")
    play.decide()
    return play


def test_a_holder_is_bound_by_its_ttl_unless_it_is_heard_and_then_by_its_max_hold() -> None:
    play = behind(granted())
    play.pass_time(12_000)
    assert said(play).endswith("held by a, for another 18 s if no heartbeat comes, for at most 60 min if they do")
    assert "for another 18 s if no heartbeat comes" in explain_demand(play.world, play.spec, MED)


def test_a_holder_whose_max_hold_comes_first_is_bound_by_that() -> None:
    play = behind(granted())
    heard = replace(play.lease("a"), expires_ms=play.world.now_ms + 30_000)
    heard = replace(heard, request=replace(heard.request, max_hold_ms=20_000))
    play.world = replace(play.world, leases={**play.world.leases, "a": heard})
    assert said(play).endswith("held by a, for at most another 20 s")


def test_each_of_several_holders_has_its_own_bound() -> None:
    play = Play(spec(tenant("med")))
    for name, ttl_ms in (("one", 5_000), ("two", 50_000)):
        play.enqueue(name, vram_mib=GIB, ttl_ms=ttl_ms)
        play.decide()
        play.run()
    behind(play)
    for part in ("one, for another 5 s if no heartbeat", "and by two, for another 50 s if no heartbeat"):
        assert part in said(play)


def test_who_waits_behind_an_expired_holder_whose_process_nobody_knows_is_told_of_the_grace() -> None:
    play = behind(granted())
    play.pass_time(30_000)
    play.decide()
    assert play.ended["a"].state is LeaseState.EXPIRED
    play.pass_time(9_000)
    assert said(play) == (
        "preparing: the VRAM is being proved free: a did not give its lease back and its process is unknown, so its "
        "memory counts as free after a grace of 30 s (21 s left); a lease that names its holder_pid is not waited for "
        "so long"
    )
    play.enqueue("c")
    assert "(21 s left)" in said(play, "c")
    assert "(21 s left)" in explain_demand(play.world, play.spec, MED)
    play.pass_time(21_000)
    assert "grace" not in said(play)


def test_no_grace_is_told_where_the_holder_gave_its_lease_back_or_named_its_process() -> None:
    play = granted()
    play.end("a")
    assert "grace" not in said(behind(play))
    play = Play(spec(tenant("med")))
    play.enqueue("a", holder_pid=77, label="encode")
    play.decide()
    play.run()
    behind(play).pass_time(30_000)
    play.decide()
    assert said(play).endswith("waiting for encode (pid 77) to end")
