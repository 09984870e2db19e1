"""A load is waited for as long as something of it moves, whatever it is and however slow, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from swapper.errors import BackendError, BackendStalled
from tests.support.virtual_time import virtual
from workers.patience import ANSWERING, GIVEN_UP, TURNING, Patience, Signs
from workers.work import MUCH, Work

STALL_S, BLIND_S = 100.0, 500.0
HOURS_S = 10_000.0


def now() -> float:
    return asyncio.get_running_loop().time()


def patience(signs: Callable[[float], Signs], *, answers: bool = False) -> Patience:
    """`signs` by the seconds since the wait began."""
    began = now()

    async def looked() -> Signs:
        return signs(now() - began)

    return Patience("m", looked, blind_s=BLIND_S, stall_s=STALL_S, answers=answers)


async def loads(signs: Callable[[float], Signs], *, for_s: float = HOURS_S, answers: bool = False) -> str:
    """What becomes of a load that takes so long."""
    try:
        return await patience(signs, answers=answers).over(asyncio.sleep(for_s, "loaded"))
    except BackendStalled as stalled:
        return f"{now():.0f} s: {stalled}"


def working(**per_s: float) -> Callable[[float], Signs]:
    return lambda t: Signs(work=Work(**{name: int(rate * t) for name, rate in per_s.items()}))


def telling(every_s: float, *, seen: bool) -> Callable[[float], Signs]:
    return lambda t: Signs(told=int(t / every_s), work=Work() if seen else None)


def logging(t: float) -> Signs:
    return Signs(said=int(t), work=Work())


@pytest.mark.parametrize(
    "signs",
    [
        pytest.param(working(bytes=2 * MUCH / STALL_S), id="reads little from a slow disk"),
        pytest.param(working(memory=2 * MUCH / STALL_S), id="maps its file"),
        pytest.param(telling(BLIND_S - 2, seen=False), id="is told of by its server, and not seen"),
        pytest.param(telling(STALL_S - 2, seen=True), id="is told of by its server"),
    ],
)
@virtual
async def test_what_takes_hours_and_moves_is_waited_for(signs: Callable[[float], Signs]) -> None:
    assert await loads(signs) == "loaded"


@virtual
async def test_what_shows_no_sign_is_given_up_after_the_stated_time_which_is_said() -> None:
    said = "m makes no progress in loading for 100 s: it neither reads nor computes"
    assert (await loads(lambda _: Signs(work=Work(9, 9, 9)))).endswith(said)
    assert STALL_S <= now() < STALL_S + 3


@virtual
async def test_what_cannot_be_seen_is_waited_for_longer() -> None:
    assert (await loads(lambda _: Signs())).endswith("for 500 s: nothing is heard of it")
    assert BLIND_S <= now() < BLIND_S + 3


@virtual
async def test_what_stands_still_in_the_middle_is_given_up_as_long_after_that() -> None:
    await loads(lambda t: Signs(work=Work(bytes=int(min(t, 1_000.0)) * MUCH)))
    assert 1_000 + STALL_S <= now() < 1_000 + STALL_S + 3


@pytest.mark.parametrize(
    "signs",
    [
        pytest.param(working(ticks=100), id="it only computes"),
        pytest.param(logging, id="its log only says that it waits"),
        pytest.param(working(bytes=MUCH / STALL_S / TURNING / 2), id="it only reads who asks it how it is"),
    ],
)
@virtual
async def test_weak_signs_count_for_some_times_as_long(signs: Callable[[float], Signs]) -> None:
    assert (await loads(signs)).endswith("for 1000 s: its processes are busy, and neither read nor take memory")
    assert STALL_S * TURNING <= now() < STALL_S * TURNING + 3


@virtual
async def test_a_first_answer_may_compute_for_less_long() -> None:
    assert "in its first answer for 300 s" in await loads(working(ticks=100), answers=True)
    assert STALL_S * ANSWERING <= now() < STALL_S * ANSWERING + 3


@virtual
async def test_a_process_that_goes_out_of_sight_has_no_longer_a_wait_for_that() -> None:
    await loads(lambda t: Signs(work=Work() if t < 50 else None))
    assert now() < STALL_S + 3


@virtual
async def test_what_nobody_wants_any_more_is_given_up_at_once() -> None:
    given_up = asyncio.Event()
    GIVEN_UP.set(given_up)
    loading = asyncio.ensure_future(patience(working(bytes=MUCH)).over(asyncio.sleep(HOURS_S)))
    await asyncio.sleep(10)
    given_up.set()
    with pytest.raises(BackendError, match="m was given up: nobody waits for it any more"):
        await loading
    assert now() < 12


@virtual
async def test_what_fails_meanwhile_fails_as_it_did() -> None:
    async def fails() -> None:
        await asyncio.sleep(5)
        raise BackendError("out of memory")

    with pytest.raises(BackendError, match="out of memory"):
        await patience(lambda _: Signs()).over(fails())
