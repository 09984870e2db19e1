"""Only work keeps a model on its card, and only work brings it: whoever looks how it is all the time does neither."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from swapper.core import unused
from swapper.core.types import Card, Demand, Gate, WorkClass, World
from swapper.gateway.admission import Admission, Call
from swapper.gateway.member import Member
from swapper.gateway.work import Sockets
from tests.support.play import MED, spec, tenant
from tests.support.virtual_time import virtual
from tests.unit.gateway_doubles import ALPHA, CHAT, Served, plain, serve
from tests.unit.gateway_link import FakeLink

TTL_MS = 300_000
WATCHED = ("/props?model=alpha", "/slots?model=alpha", "/upstream/alpha/health", "/upstream/alpha/metrics")
LISTS = ("/v1/models", "/v1/models/alpha", "/models", "/running")


async def got(served: Served, path: str) -> tuple[int, Mapping[str, object]]:
    async with served.client.get(served.url + path) as response:
        return response.status, await response.json(content_type=None)


def used(demand: tuple[Demand, ...]) -> bool:
    return any(one.used for one in demand)


async def test_a_call_is_told_with_the_next_beat_however_short_it_was_and_then_no_more() -> None:
    async with serve() as served:
        assert (await served.call(CHAT)).status == 200
        assert served.admission.demand() == ()
        served.admission.on_change()
        assert await served.link.beaten(used)
        served.admission.on_change()
        await served.link.beaten(lambda demand: not used(demand))


@pytest.mark.parametrize("path", [*WATCHED, "/upstream/alpha/", "/v1/audio/voices?model=alpha"])
async def test_a_look_is_no_work(path: str) -> None:
    async with serve() as served:
        served.upstream.scripts = [plain("{}", 200)]
        assert (await got(served, path))[0] == 200
        assert served.admission.used() == frozenset()


async def test_a_call_that_runs_beside_looks_is_work() -> None:
    async with serve() as served:
        look = served.admission.admit(ALPHA, WorkClass.INTERACTIVE, "ann", 1000, looks=True)
        assert served.admission.used() == frozenset()
        work = served.admission.admit(ALPHA, WorkClass.INTERACTIVE, "ann", 1000)
        assert served.admission.used() == {ALPHA}
        for call in (look, work):
            assert isinstance(call, Call)
            call.finish()


@pytest.mark.parametrize("path", WATCHED)
async def test_who_watches_a_model_that_is_away_is_told_so_and_does_not_bring_it(path: str) -> None:
    async with serve(opened=False) as served, asyncio.timeout(10):
        codes: list[int] = []
        served.ctx.told = lambda _tenant, code, _waited_ms: codes.append(code)
        status, told = await got(served, path)
        assert (status, "looking does not bring it" in str(told)) == (503, True)
        assert served.admission.demand() == ()
        assert codes == [503]  # counted like any answer


class Heard(FakeLink):
    """The store and the coordinator's memory of use, for one model with a ttl."""

    def __init__(self) -> None:
        super().__init__()
        self.gates[MED] = Gate(1, open=True)
        self.spec = spec(replace(tenant("med"), ttl_ms=TTL_MS))
        self.used: dict[str, int] = {}
        self.left_ms: int | None = None

    async def beat(self, gateway: str, demand: tuple[Demand, ...], *, ttl_ms: int, now_ms: int | None = None) -> bool:
        member = await super().beat(gateway, demand, ttl_ms=ttl_ms, now_ms=now_ms)
        card, now = Card("gpu0", residents=(MED,)), round(asyncio.get_running_loop().time() * 1000)
        world = World(now, {"gpu0": card}, {}, demand=demand)
        unused.note(world, self.spec, self.used)
        if unused.expired(world, self.spec, card, self.used) and self.left_ms is None:
            self.left_ms = now
        return member


async def lived(*, work_every_s: int | None) -> int | None:
    """When the model left, ms, in ten minutes of looks and an open socket whose server goes on telling; None: never."""
    link, loop = Heard(), asyncio.get_running_loop()
    admission = Admission("g1", clock=lambda: round(loop.time() * 1000))
    member = Member(link, admission)
    socket = Sockets(admission).opened(MED, WorkClass.INTERACTIVE, "ann", 1000)
    await member.start()
    for second in range(600):
        look = admission.admit(MED, WorkClass.INTERACTIVE, "ann", 1000, looks=True)
        await socket.answered()
        await asyncio.sleep(0.9)
        assert isinstance(look, Call)
        look.finish()
        if work_every_s is not None and second % work_every_s == 0:
            work = admission.admit(MED, WorkClass.INTERACTIVE, "ann", 1000)
            assert isinstance(work, Call)
            work.finish()
        await asyncio.sleep(0.1)
    assert member.problem is None
    await member.close()
    return link.left_ms


@virtual
async def test_however_much_is_looked_and_told_it_leaves_after_its_ttl() -> None:
    left_ms = await lived(work_every_s=None)
    assert left_ms is not None
    assert TTL_MS <= left_ms <= TTL_MS + 10_000


@virtual
async def test_calls_that_are_over_between_two_beats_keep_it() -> None:
    assert await lived(work_every_s=60) is None
