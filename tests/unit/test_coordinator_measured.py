"""The coordinator on a card whose VRAM only its probe knows: it begins once an agent has told it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from swapper.coordinator import Coordinator
from swapper.core.spec import Spec
from swapper.store import embedded
from swapper.store.redis import RedisStore
from tests.support.play import spec, tenant
from tests.unit.test_coordinator import MED, Hands, Rig, serving


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    server = await embedded.start(tmp_path)
    store = await RedisStore.open(server.url)
    ids = count(1)
    known = spec(replace(tenant("med", default=True, takes_all=True), need_mib=0))
    cards = {"gpu0": replace(known.cards["gpu0"], total_mib=0, reserve_mib=512, measured=True)}
    made = Coordinator(store, replace(known, cards=cards), lambda prefix: f"{prefix}_{next(ids)}")
    hands = Hands(store)
    await store.beat("g1", (), ttl_ms=60_000)
    tasks = [asyncio.create_task(work) for work in (made.run(), hands.work("agent:main"), hands.work("gateway:g1"))]
    await made.listening.wait()
    yield Rig(store, made, hands)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()
    await embedded.stop(tmp_path)


async def test_nothing_is_done_before_a_card_was_read_and_its_defaults_come_once_it_was(rig: Rig) -> None:
    told: list[Spec] = []
    rig.coordinator.on_learned = told.append
    await rig.hands.say("observed", {"tenants": {MED: "unloaded"}, "cards": {"gpu0": {"unread": "no driver"}}})
    await rig.hands.hello()
    await rig.until(lambda _: "main" in rig.coordinator.seen.hosts and "gpu0" in rig.coordinator.seen.readings)
    assert (rig.hands.done, told) == ([], [])
    await rig.hands.observed({MED: "unloaded"}, 24_576)
    await rig.until(serving)
    (spec,) = told
    assert (spec.cards["gpu0"].total_mib, spec.tenants[MED].need_mib) == (24_576, 24_064)
    assert rig.coordinator.spec is spec
    (proof,) = [command for command in rig.hands.done if command.verb == "vacate"]
    assert proof.args["need_mib"] == 24_064


async def test_which_devices_a_card_is_stays_known_while_it_cannot_be_read(rig: Rig) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "GPU-9"}
    await rig.hands.say("observed", {"cards": {"gpu0": {"total_mib": 24_576, "free_mib": 0, "env": env}}})
    await rig.hands.say("observed", {"cards": {"gpu0": {"unread": "the driver is gone"}}})
    await rig.until(lambda _: "unread" in rig.coordinator.seen.readings.get("gpu0", {}))
    assert rig.coordinator.seen.readings["gpu0"] == {"unread": "the driver is gone", "env": env}


async def test_what_was_learned_stays_while_the_card_cannot_be_read(rig: Rig) -> None:
    await rig.hands.hello()
    await rig.hands.observed({MED: "unloaded"}, 24_576)
    await rig.until(serving)
    await rig.hands.say("observed", {"tenants": {MED: "loaded"}, "cards": {"gpu0": {"unread": "the driver is gone"}}})
    await rig.until(lambda _: "unread" in rig.coordinator.seen.readings["gpu0"])
    assert rig.coordinator.seen.free_mib("gpu0") is None
    assert rig.coordinator.spec.cards["gpu0"].total_mib == 24_576
