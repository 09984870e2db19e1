"""When a model may be there: by what was stated or measured, and never made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core.eta import there_in_ms
from swapper.core.types import Failure, Fault
from tests.support.play import GIB, MED, SAVED, SLOTS, Play, spec, tenant

BIG = "llama/big"


def played(**loads: int) -> Play:
    found = Play(spec(tenant("med"), tenant("big", 20 * GIB)), MED)
    changed(found, loads={f"llama/{name}": ms for name, ms in loads.items()})
    return found


def changed(found: Play, **fields: object) -> None:
    found.world = replace(found.world, cards={"gpu0": replace(found.card, **fields)})  # pyright: ignore[reportArgumentType]


def eta(found: Play) -> int | None:
    return there_in_ms(found.world, found.spec, BIG)


def leased(expected_ms: int | None, **loads: int) -> Play:
    found = played(**loads)
    found.enqueue("a", expected_ms=expected_ms)
    found.decide()
    found.run(drain={"slots": SLOTS}, save=SAVED)
    return found


def test_a_lease_that_says_how_long_it_takes_is_over_then_and_the_load_comes_on_top() -> None:
    found = leased(60_000, big=9_000)
    found.pass_time(20_000)
    assert eta(found) == 49_000


@pytest.mark.parametrize(("expected_ms", "passed_ms"), [(None, 0), (60_000, 60_001)])
def test_of_a_lease_that_says_nothing_or_takes_longer_nobody_can_tell(expected_ms: int | None, passed_ms: int) -> None:
    found = leased(expected_ms, big=9_000)
    found.pass_time(passed_ms)
    assert eta(found) is None


def test_a_load_under_way_takes_what_it_took() -> None:
    found = played(big=9_000)
    found.demand((BIG, 1, 0))
    found.decide()
    found.pass_time(4_000)
    assert eta(found) == 5_000
    found.pass_time(60_000)
    assert eta(found) == 0


def test_one_that_was_never_loaded_cannot_be_told() -> None:
    found = played()
    found.demand((BIG, 1, 0))
    found.decide()
    assert eta(found) is None


def test_one_that_rests_comes_with_its_next_try() -> None:
    found = played(big=9_000)
    changed(found, failed={BIG: Failure("no such file", 2, found.world.now_ms + 55_000)})
    assert eta(found) == 55_000


def test_of_a_card_at_fault_and_of_what_is_not_configured_nobody_can_tell() -> None:
    found = played(big=9_000)
    changed(found, fault=Fault("somebody has it", 1, 0))
    assert eta(found) is None
    assert there_in_ms(found.world, found.spec, "llama/none") is None
