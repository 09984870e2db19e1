"""What goes wrong, as the plan says: faults of routers and of the store, deaths and stalls of processes, damaged files.

Invariant: everything that goes wrong is told to the world when it begins and when it is over, and is over once `run`
has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.sim.box import KILLED
from tests.sim.plan import Trouble
from tests.sim.serve import Serving
from tests.sim.servers import ComfyBox, OllamaBox, ServerBox
from tests.sim.world import World

VRAM_STAYS_S, RESTART_S, MOST_LATE_S = 12.0, 0.5, 2.5


class Troubles:
    """`serving` is who runs under a name now, None while nobody does; `again` starts it anew."""

    def __init__(self, world: World, serving: Callable[[str], Serving | None], again: Callable[[str], None]) -> None:
        self._world = world
        self._serving = serving
        self._again = again
        self._kinds: dict[str, Callable[[Trouble], Awaitable[None]]] = {
            "fault": self._fault,
            "death": self._death,
            "lost before": self._lost,
            "lost after": self._lost,
            "down": self._down,
            "rollback": self._rollback,
            "router dies": self._router_dies,
            "child dies": self._child_dies,
            "damage": self._damage,
            "stall": self._stall,
            "clock": self._clock,
            "stranger": self._stranger,
            "unread": self._unread,
            "late": self._late,
            "box starts": self._box_starts,
            "box dies": self._box_dies,
            "engine away": self._engine_away,
            "box lies": self._box_lies,
            "box stays": self._box_stays,
            "box grows": self._box_grows,
            "box hangs": self._box_hangs,
            "deaf": self._deaf,
            "torn": self._torn,
            "mute": self._mute,
            "vram late": self._vram_late,
            "direct": self._direct,
            "prompt": self._prompt,
        }

    async def run(self, trouble: Trouble) -> None:
        """Let it happen at its time; returns once it is over."""
        await asyncio.sleep(trouble.at)
        self._world.say(f"TROUBLE {trouble.what} {trouble.where} {_words(trouble)}")
        self._world.disturbed()
        await self._kinds[trouble.what](trouble)
        self._world.disturbed()
        self._world.say(f"over: {trouble.what} {trouble.where}")

    async def _fault(self, trouble: Trouble) -> None:
        place = self._world.places[trouble.where]
        assert trouble.fault is not None
        place.router.faults.set(trouble.fault)
        await asyncio.sleep(VRAM_STAYS_S)  # it may strike until then
        place.router.told.drop(trouble.fault)
        place.vram.free()

    async def _death(self, trouble: Trouble) -> None:
        serving = self._serving(trouble.where)
        if serving is None or not serving.process.alive or serving.doomed:
            return
        died = asyncio.Event()
        serving.doomed = True
        serving.power = trouble.flag
        serving.process.on_death.append(died.set)
        serving.process.die_at = trouble.count
        try:
            async with asyncio.timeout(8):
                await died.wait()
        except TimeoutError:
            serving.process.kill()
        self._world.disturbed()
        await serving.process.buried()
        await asyncio.sleep(trouble.seconds)
        self._again(trouble.where)

    async def _lost(self, trouble: Trouble) -> None:
        before = trouble.what == "lost before"
        store = self._world.store
        store.fail(before=trouble.count if before else 0, after=0 if before else trouble.count)
        await asyncio.sleep(3)

    async def _down(self, trouble: Trouble) -> None:
        self._world.store.down()
        await asyncio.sleep(trouble.seconds)
        self._world.store.up()

    async def _rollback(self, trouble: Trouble) -> None:
        world = self._world
        stored, fold = world.store.copy(), world.check.fold.copy()
        await asyncio.sleep(trouble.seconds)
        world.store.down()
        await asyncio.sleep(RESTART_S)
        world.say("the store is rolled back")
        world.check.rewound(fold)
        world.store.rollback(stored)
        world.store.up()

    async def _router_dies(self, trouble: Trouble) -> None:
        router = self._world.places[trouble.where].router
        router.die()
        await asyncio.sleep(trouble.seconds)
        if not self._world.plan.controlled and not router.alive:
            self._world.say(f"    router of {trouble.where} is there again")
            router.start()

    async def _child_dies(self, trouble: Trouble) -> None:
        place = self._world.places[trouble.where]
        children = [child for model in place.plan.models if (child := place.router.child(model.name)) is not None]
        if children:
            child = children[int(trouble.seconds * 10) % len(children)]
            self._world.say(f"    the process of {child.model.name} dies")
            child.end(137)

    async def _damage(self, trouble: Trouble) -> None:
        for place in self._world.places.values():
            files = sorted(place.slot_dir.glob("*.kv"))
            if files:
                file = files[int(trouble.seconds * 100) % len(files)]
                data = bytearray(file.read_bytes())
                if int(trouble.seconds * 10) % 2 and data:
                    del data[-1]
                elif data:
                    data[len(data) // 2] ^= 1
                file.write_bytes(data)
                self._world.say(f"    {file.name} is damaged")

    async def _stall(self, trouble: Trouble) -> None:
        serving = self._serving(trouble.where)
        if serving is not None:
            serving.process.stall(on=True)
            await asyncio.sleep(trouble.seconds)
            serving.process.stall(on=False)

    async def _stranger(self, trouble: Trouble) -> None:
        """Somebody who has nothing to do with us takes VRAM, where there is some."""
        vram, name = self._world.places[trouble.where].vram, f"stranger of {trouble.at:.2f}"
        if vram.used_mib + trouble.count <= self._world.places[trouble.where].plan.total_mib:
            vram.intrude(name, trouble.count)
            await asyncio.sleep(trouble.seconds)
            vram.let_go(name)

    async def _unread(self, trouble: Trouble) -> None:
        meter = self._world.places[trouble.where].meter
        meter.unread_ms = self._world.steady_ms()
        await asyncio.sleep(min(trouble.seconds, VRAM_STAYS_S))
        meter.unread_ms = None

    async def _late(self, trouble: Trouble) -> None:
        meter = self._world.places[trouble.where].meter
        meter.late_s = min(trouble.seconds, MOST_LATE_S)
        await asyncio.sleep(VRAM_STAYS_S)
        meter.late_s = 0.0

    async def _box_starts(self, trouble: Trouble) -> None:
        """Somebody else starts it, or its engine does."""
        self._world.box(trouble.where).start(by="its engine" if trouble.flag else "somebody else")

    async def _box_dies(self, trouble: Trouble) -> None:
        self._world.box(trouble.where).end(KILLED)

    async def _engine_away(self, trouble: Trouble) -> None:
        box = self._world.box(trouble.where)
        box.away = True
        box.beat()
        await asyncio.sleep(trouble.seconds)
        box.away = False
        box.beat()

    async def _box_lies(self, trouble: Trouble) -> None:
        """An order is taken, and not done."""
        lies = self._world.box(trouble.where).lies
        if trouble.flag:
            lies.starts += trouble.count
        else:
            lies.stops += trouble.count
        await asyncio.sleep(VRAM_STAYS_S)
        lies.starts = lies.stops = 0

    async def _box_stays(self, trouble: Trouble) -> None:
        box = self._world.box(trouble.where)
        box.lies.sticks = True
        await asyncio.sleep(trouble.seconds)
        box.lies.sticks = False
        box.vram.free()

    async def _box_grows(self, trouble: Trouble) -> None:
        box = self._world.box(trouble.where)
        check, holder = self._world.check, box.holder
        check.stuck.add(holder)
        box.grow(1500)
        await asyncio.sleep(trouble.seconds)
        if box.holder == holder:
            box.grow(0)
        check.stuck.discard(holder)

    async def _box_hangs(self, trouble: Trouble) -> None:
        """What is started next is never up."""
        lies = self._world.box(trouble.where).lies
        lies.hangs = 1
        await asyncio.sleep(VRAM_STAYS_S)
        lies.hangs = 0

    def _server(self, trouble: Trouble) -> ServerBox:
        return next(box for box in self._world.servers if box.plan.name == trouble.where)

    async def _deaf(self, trouble: Trouble) -> None:
        """From now on its process says that it gives its VRAM back, and does not."""
        self._server(trouble).tales.deaf = True
        await asyncio.sleep(0)

    async def _mute(self, trouble: Trouble) -> None:
        """Once it has nothing of the card its process answers nobody."""
        self._server(trouble).tales.mute = True
        await asyncio.sleep(0)

    async def _torn(self, trouble: Trouble) -> None:
        tales = self._server(trouble).tales
        tales.torn += trouble.count
        await asyncio.sleep(VRAM_STAYS_S)
        tales.torn = 0

    async def _vram_late(self, trouble: Trouble) -> None:
        """What it lists no more lives a little longer: less than a release waits for its end."""
        tales = self._server(trouble).tales
        tales.late_s = 0.5 + trouble.count
        await asyncio.sleep(2 * VRAM_STAYS_S)
        tales.late_s = 0.0

    async def _direct(self, trouble: Trouble) -> None:
        """Somebody calls a model past us, in the midst of things or again and again."""
        box = self._server(trouble)
        assert isinstance(box, OllamaBox)
        name = box.plan.models[trouble.count % len(box.plan.models)][0]
        for _ in range(3 if trouble.flag else 1):
            await box.direct(name, trouble.seconds / 3)

    async def _prompt(self, trouble: Trouble) -> None:
        """Somebody has it render past us, where there is room."""
        box = self._server(trouble)
        assert isinstance(box, ComfyBox)
        if box.alive and (box.holds or box.vram.used_mib + box.plan.need_mib <= box.total_mib):
            box.begin(trouble.seconds, by="somebody else")
        await asyncio.sleep(trouble.seconds)

    async def _clock(self, trouble: Trouble) -> None:
        self._world.stepped_ms += trouble.count * 1000
        await asyncio.sleep(0)


def _words(trouble: Trouble) -> str:
    if trouble.fault is not None:
        fault = trouble.fault
        return f"{fault.verb} {fault.kind}{' after' if fault.after else ''} times={fault.times} {fault.seconds:.1f} s"
    return f"{trouble.seconds:.2f} s, {trouble.count}{', power cut' if trouble.flag else ''}"
