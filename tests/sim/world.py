"""The world of one simulation: the clock, the store, the routers and their cards, the processes, and the history.

Invariant: all that is random here comes from the plan's seed, all that is told goes to `history`, in order.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from swapper.core.spec import CardSpec, PolicySpec, Spec, TenantSpec
from swapper.core.types import WorkClass
from tests.sim.box import Box, Prompts
from tests.sim.check import Check
from tests.sim.jobs import Works
from tests.sim.meter import Meter
from tests.sim.physical import WatchedRouter, WatchedStore, WatchedVram
from tests.sim.plan import BoxPlan, CardPlan, Plan
from tests.sim.process import Process
from tests.sim.seen import Limits
from tests.sim.servers import SERVERS, ServerBox
from tests.support.fake_child import Pace
from tests.support.fake_session import FakeSession
from tests.support.fake_slots import FakeModel

if TYPE_CHECKING:
    from tests.sim.others import Session as OtherSession

EPOCH_MS = 1_790_000_000_000
GRACE_MS, DRAIN_MS, VACATE_MS, IDLE_MS = 4_000, 4_000, 3_000, 2_000
PAUSES_S = (0.0, 0.0, 0.0, 0.0, 0.001, 0.003, 0.02, 0.2)
AGENTS_HOST = "main"


@dataclass(frozen=True, slots=True)
class Place:
    """A card as it physically is: its router, who holds its VRAM, where its snapshots lie, what else runs there."""

    plan: CardPlan
    server: str
    url: str
    router: WatchedRouter
    vram: WatchedVram
    slot_dir: Path
    meter: Meter
    boxes: tuple[Box, ...] = ()
    prompts: Mapping[str, Prompts] = field(default_factory=dict[str, Prompts])


class World:
    """See the module text. `folder` is on a disk of its own, empty at first."""

    def __init__(self, plan: Plan, folder: Path, tell: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.folder = folder
        self.rng = random.Random(f"{plan.seed}/run")
        self.history: list[str] = []
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pauses = random.Random(f"{plan.seed}/pauses")
        vrams = {card.name: WatchedVram(card.name, card.room_mib) for card in plan.cards}
        held = {name: vram.held for name, vram in vrams.items()}
        self.stepped_ms = 0
        """How far the store's clock was stepped in all."""
        self.check = Check(
            plan.cards, held, self.steady_ms, self.now_ms, self.say, measured=plan.measured, limits=limits_of(plan)
        )
        self.store = WatchedStore(self.now_ms, self.pause, self.check)
        self.spec = spec_of(plan)
        self.places = {card.name: self._place(card, vrams[card.name]) for card in plan.cards}
        for vram in vrams.values():
            vram.check = self.check
        self.works = Works(self)
        self.check.works = self.works.of
        self.processes: dict[str, Process] = {}
        self.in_flight: dict[str, Callable[[str], int]] = {}
        """Gateway id -> calls of a tenant in flight there, of processes that live."""
        self.gateway_of: dict[str, str] = {}
        """The gateway id on record in each state folder."""
        self.sessions: dict[str, FakeSession] = {}
        """What the backends of each process talk to."""
        self.talks: dict[str, OtherSession] = {}
        """The same, of those of other kinds."""
        self.quiet_from = 0.0
        """When the last thing went wrong, or the last lease ended."""

    def _place(self, card: CardPlan, vram: WatchedVram) -> Place:
        number = card.name.removeprefix("gpu")
        slot_dir = self.folder / f"slots{number}"
        slot_dir.mkdir()
        models: list[FakeModel] = []
        for model in card.models:
            path = self.folder / f"{model.name}.gguf"
            path.write_bytes(b"GGUF" + bytes(20) + model.name.encode())
            models.append(
                FakeModel(
                    model.name,
                    str(path),
                    parallel=model.parallel,
                    kv_unified=model.unified,
                    cached=model.cached,
                    attention=model.attention,
                    vram_mib=model.need_mib,
                    stop_timeout_s=3,
                )
            )
        pace = self.plan.pace
        router = WatchedRouter(
            card.name,
            models,
            slot_dir=slot_dir,
            pace=Pace(0.8 * pace, 0.1 * pace, 0.0005, 0.01 * pace, 0.05 * pace),
            vram=vram,
            check=self.check,
            say=self.say,
            in_flight=self.calls_in_flight,
        )
        boxes = tuple(self._box(box, card, vram) for box in card.boxes)
        prompts = {box.name: Prompts() for box in card.boxes if box.by_lease}
        url = f"http://127.0.0.1:{5001 + int(number)}"
        return Place(card, f"r{number}", url, router, vram, slot_dir, Meter(card, vram), boxes, prompts)

    def _box(self, plan: BoxPlan, card: CardPlan, vram: WatchedVram) -> Box:
        where = (plan, card.name, vram, self.say, card.total_mib)
        if plan.kind not in SERVERS:
            return Box(*where)
        server = SERVERS[plan.kind](*where)
        server.unloading = lambda unload: self.check.unloading(card.name, unload)
        server.in_flight, server.stuck = self.calls_in_flight, self.check.stuck
        return server

    @property
    def servers(self) -> tuple[ServerBox, ...]:
        """The boxes with a server in them."""
        return tuple(b for place in self.places.values() for b in place.boxes if isinstance(b, ServerBox))

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._loop.time()

    def steady_ms(self) -> int:
        """A clock that nobody steps."""
        return int(self.now * 1000)

    def now_ms(self) -> int:
        """The store's clock."""
        return EPOCH_MS + self.stepped_ms + self.steady_ms()

    def say(self, text: str) -> None:
        """A line of the history."""
        line = f"{self.now:8.3f} {text}"
        self.history.append(line)
        if self._tell is not None:
            self._tell(line)

    def new_id(self, prefix: str) -> str:
        """A fresh id."""
        return f"{prefix}{next(self._ids)}"

    async def pause(self) -> None:
        """How long the store takes, before and after it acts."""
        await asyncio.sleep(self._pauses.choice(PAUSES_S))

    def disturbed(self) -> None:
        """Something went wrong just now: from here on there is time to recover."""
        self.quiet_from = max(self.quiet_from, self.now)

    def calls_in_flight(self, tenant: str) -> dict[str, int]:
        """At each gateway that lives and is a member."""
        members = set(self.store.library.read(self.now_ms()).gateways)
        return {name: count(tenant) for name, count in self.in_flight.items() if name in members}

    def box(self, name: str) -> Box:
        """The thing of that name."""
        return next(box for place in self.places.values() for box in place.boxes if box.plan.name == name)

    def tenant(self, model: str) -> str:
        """The tenant id of a model."""
        return next(t for t in self.spec.tenants if t == model or t.endswith(f"/{model}"))


def limits_of(plan: Plan) -> Limits:
    """What is promised of durations; of max_hold and drains only where each step of the clock is seen by somebody."""
    seen = all(trouble.what not in ("death", "down") for trouble in plan.troubles)
    return Limits(GRACE_MS, DRAIN_MS if seen else 0, holds=seen)


def _served(card: CardPlan) -> Iterator[tuple[str, TenantSpec]]:
    """Of servers of other kinds that are called by model name."""
    for box in card.boxes:
        whole = {box.name: box.need_mib} if box.kind == "vllm" else {}
        for name, need in (whole | {f"{box.name}/{model}": mib for model, mib in box.models}).items():
            yield name, TenantSpec(name, box.name, card.name, AGENTS_HOST, need, kind=box.kind, save=False)


def spec_of(plan: Plan) -> Spec:
    """The configuration."""
    cards = {
        c.name: CardSpec(c.name, 0 if c.learned else c.total_mib, c.reserve_mib, AGENTS_HOST, measured=c.learned)
        for c in plan.cards
    }
    tenants: dict[str, TenantSpec] = {}
    for card in plan.cards:
        server = f"r{card.name.removeprefix('gpu')}"
        for model in card.models:
            name = f"{server}/{model.name}"
            tenants[name] = TenantSpec(
                name,
                server,
                card.name,
                AGENTS_HOST,
                model.need_mib,
                default=model.default,
                save_required=model.required,
                every_ms=card.every_ms,
            )
        tenants |= dict(_served(card))
        for box in (one for one in card.boxes if one.kind not in ("vllm", "ollama")):
            tenants[box.name] = TenantSpec(
                box.name,
                box.name,
                card.name,
                AGENTS_HOST,
                box.need_mib if not box.by_lease else box.part_mib or card.capacity,
                kind="comfyui" if box.by_lease else "none",
                default=box.default,
                by_lease=box.by_lease,
                takes_all=box.by_lease and box.part_mib is None,
                save=False,
                serves_models=False,
            )
    policy = PolicySpec(
        dict.fromkeys(WorkClass, DRAIN_MS),
        on_drain_limit="reopen" if plan.reopen else "end",
        grace_ms=GRACE_MS,
        vacate_ms=VACATE_MS,
        idle_restore_ms=IDLE_MS,
    )
    return Spec(cards, tenants, policy)
