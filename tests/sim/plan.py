"""A plan: everything of one simulation that is chosen, drawn from the seed before anything runs.

Times are seconds from the start, sizes MiB. What happens at the same moment in the running simulation (how long each
await takes) is drawn there, from the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from swapper.core.errand import Verb
from swapper.core.types import WorkClass
from tests.support.fake_faults import Fault, Kind
from tests.support.fake_faults import Verb as Asked
from tests.support.fake_slots import Attention

TROUBLE_S = 40.0
"""Nothing goes wrong by itself any more after that."""


class Way(StrEnum):
    """How an owner behaves."""

    DUTIFUL = "dutiful"
    FORGETS = "forgets"
    LATE = "late"
    CANCELS = "cancels"
    VANISHES = "vanishes"
    KEEPS = "keeps"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model. `required`: its conversations must be saved. `cached`: so many its server's RAM cache has room for."""

    name: str
    need_mib: int
    default: bool
    parallel: int
    required: bool
    attention: Attention = Attention.DENSE
    cached: int = 0
    unified: bool = False


@dataclass(frozen=True, slots=True)
class BoxPlan:
    """One thing that is started and stopped, and the seconds that takes. `kind`: how to talk to it, if at all.

    `models`: those of a server that has several, and what each needs; `level` of a vLLM's sleep. `by_lease`: it is
    there by leases of its own, for `part_mib` (None: all) each. Prompts: when they come, and the seconds each takes.
    """

    name: str
    need_mib: int
    default: bool
    start_s: float
    stop_s: float
    by_lease: bool = False
    part_mib: int | None = None
    prompts: tuple[tuple[float, float], ...] = ()
    kind: str = "none"
    models: tuple[tuple[str, int], ...] = ()
    level: int = 1


@dataclass(frozen=True, slots=True)
class CardPlan:
    """One card, the models of the router beside it, and other things; `strategy` is how conversations are kept.

    `every_ms`: so often idle slots are saved, None: never. `room_mib`: what its models find no room beyond, though
    their needs say otherwise; None: they are right. `learned`: only its probe tells how much it has.
    """

    name: str
    total_mib: int
    reserve_mib: int
    models: tuple[ModelPlan, ...]
    strategy: str = "auto"
    every_ms: int | None = None
    boxes: tuple[BoxPlan, ...] = ()
    room_mib: int | None = None
    learned: bool = False

    @property
    def capacity(self) -> int:
        """What a whole lease gets."""
        return self.total_mib - self.reserve_mib


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """One lease and who asks for it. `overstay_s`: how long its process lives on once it should have ended."""

    name: str
    at: float
    card: str | None
    vram_mib: int | None
    klass: WorkClass
    ttl_ms: int
    work_s: float
    way: Way
    overstay_s: float
    max_hold_ms: int
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job, and its process. `cancel_s`: its caller wants its end so long after it was taken, None: never.

    `code`: its exit status; `seen` False: nobody sees it. `missing`: its program is not there.
    """

    name: str
    at: float
    card: str | None
    vram_mib: int | None
    takes_s: float
    max_hold_ms: int
    cancel_s: float | None
    code: int
    seen: bool
    missing: bool


@dataclass(frozen=True, slots=True)
class HandPlan:
    """Something done by hand, about tenant `name`, or the card where it is vacated."""

    at: float
    verb: Verb
    card: str
    name: str
    drain_s: float | None
    force: bool


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call. `tokens` to be said; `hang_up_s`: the client waits no longer than that."""

    at: float
    model: str
    talk: int
    stream: bool
    tokens: int
    hang_up_s: float
    chat: bool


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that goes wrong. What the fields mean hangs on `what`; see trouble.py."""

    at: float
    what: str
    where: str = ""
    seconds: float = 0.0
    count: int = 0
    flag: bool = False
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it. `layout`: `one` process, `two` of them that both decide, or each part `apart`."""

    seed: int
    layout: str
    measured: bool
    controlled: bool
    cards: tuple[CardPlan, ...]
    owners: tuple[OwnerPlan, ...]
    calls: tuple[CallPlan, ...]
    troubles: tuple[Trouble, ...]
    reopen: bool
    pace: float
    jobs: tuple[JobPlan, ...] = ()
    hands: tuple[HandPlan, ...] = ()

    @property
    def parties(self) -> tuple[str, ...]:
        """The processes."""
        return {"one": ("main",), "two": ("main", "second"), "apart": ("brain", "hands", "door")}[self.layout]


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"{seed}/plan")
    layout = rng.choice(("one", "one", "two", "apart"))
    measured = rng.random() < 0.5
    controlled = rng.random() < 0.4
    names = iter("abcdef")
    cards = tuple(_kept(seed, _card(rng, f"gpu{n}", names)) for n in range(rng.choice((1, 1, 2))))
    owners = tuple(_owner(rng, f"o{n}", cards, measured=measured) for n in range(rng.randint(2, 6)))
    calls = tuple(sorted((_call(rng, cards) for _ in range(rng.randint(6, 16))), key=lambda call: call.at))
    plan = Plan(
        seed, layout, measured, controlled, cards, owners, calls, (), rng.random() < 0.25, rng.choice((0.3, 1.0, 2.0))
    )
    troubles = [_trouble(rng, plan) for _ in range(rng.choice((0, 1, 2, 3, 4, 5)))]
    troubles += _steps(seed)
    return replace(plan, troubles=tuple(sorted(troubles, key=lambda trouble: trouble.at)))


def _card(rng: random.Random, name: str, names: Iterator[str]) -> CardPlan:
    reserve = rng.choice((0, 500))
    count = rng.randint(1, 2)
    models: list[ModelPlan] = []
    for nth in range(count):
        default = nth == 0 or rng.random() < 0.3
        need = rng.choice((4000, 6000)) if default else rng.choice((4000, 6000, 9000))
        models.append(ModelPlan(next(names), need, default, rng.choice((1, 2)), rng.random() < 0.3))
    total = max(12_000, sum(model.need_mib for model in models if model.default)) + reserve
    return CardPlan(name, total, reserve, tuple(models))


def _kept(seed: int, card: CardPlan) -> CardPlan:
    """What kinds its models are of, and how conversations are kept: drawn apart, so that the rest of a plan stays."""
    rng = random.Random(f"{seed}/{card.name}/kept")
    kinds = (Attention.DENSE, Attention.DENSE, Attention.HYBRID, Attention.WINDOW)
    models = tuple(
        replace(model, attention=rng.choice(kinds), cached=rng.choice((0, 4)), unified=rng.random() < 0.25)
        for model in card.models
    )
    strategy = rng.choice(("auto", "auto", "rewind", "replay"))
    # Where they are only read again nobody gets a lease once more are required than there are slots: no plan has that.
    read_again = [strategy == "replay" or model.attention is Attention.WINDOW for model in models]
    models = tuple(replace(m, required=m.required and not only) for m, only in zip(models, read_again, strict=True))
    return replace(card, models=models, strategy=strategy, every_ms=rng.choice((None, 500, 3_000)))


def _owner(rng: random.Random, name: str, cards: tuple[CardPlan, ...], *, measured: bool) -> OwnerPlan:
    card = rng.choice(cards)
    whole = rng.random() < 0.6
    ways = [Way.DUTIFUL] * 5 + [Way.FORGETS, Way.LATE, Way.CANCELS, Way.VANISHES] + [Way.KEEPS] * measured
    return OwnerPlan(
        name,
        rng.uniform(0, 25),
        card.name if rng.random() < 0.8 else None,
        None if whole else rng.choice((2000, 5000, 8000)),
        rng.choice(list(WorkClass)[:3]),
        rng.choice((5000, 7000)),
        rng.uniform(0.2, 7),
        rng.choice(ways),
        rng.uniform(0, 10) if measured else rng.uniform(0, 2),
        rng.choice((3_600_000, 3_600_000, 3_600_000, 4000)),
        rng.uniform(2, 20) if rng.random() < 0.15 else None,
    )


def _call(rng: random.Random, cards: tuple[CardPlan, ...]) -> CallPlan:
    models = [model.name for card in cards for model in card.models]
    return CallPlan(
        rng.uniform(0, TROUBLE_S),
        rng.choice(models),
        rng.randint(1, 2),
        rng.random() < 0.5,
        rng.choice((2, 10, 50, 400)),
        rng.choice((0.5, 8.0, 60.0, 60.0)),
        rng.random() < 0.5,
    )


_FAULTS: tuple[tuple[Asked, Kind], ...] = (
    (Asked.UNLOAD, Kind.LATE),
    (Asked.UNLOAD, Kind.ERROR),
    (Asked.UNLOAD, Kind.HANG),
    (Asked.UNLOAD, Kind.DROP),
    (Asked.LOAD, Kind.LATE),
    (Asked.LOAD, Kind.ERROR),
    (Asked.LOAD, Kind.HANG),
    (Asked.LOAD, Kind.DROP),
    (Asked.LOAD, Kind.CHILD_DIES),
    (Asked.LOAD, Kind.MUTE),
    (Asked.SAVE, Kind.LATE),
    (Asked.SAVE, Kind.ERROR),
    (Asked.SAVE, Kind.HANG),
    (Asked.SAVE, Kind.DROP),
    (Asked.SAVE, Kind.CHILD_DIES),
    (Asked.SAVE, Kind.SHORT_FILE),
    (Asked.RESTORE, Kind.LATE),
    (Asked.RESTORE, Kind.ERROR),
    (Asked.RESTORE, Kind.HANG),
    (Asked.RESTORE, Kind.DROP),
    (Asked.RESTORE, Kind.CHILD_DIES),
    (Asked.RESTORE, Kind.NO_REUSE),
    (Asked.ANSWER, Kind.LATE),
    (Asked.ANSWER, Kind.ERROR),
    (Asked.ANSWER, Kind.DROP),
    (Asked.ANSWER, Kind.CHILD_DIES),
    (Asked.MODELS, Kind.LATE),
    (Asked.MODELS, Kind.ERROR),
    (Asked.MODELS, Kind.HANG),
    (Asked.MODELS, Kind.DROP),
    (Asked.SLOTS, Kind.HANG),
    (Asked.SLOTS, Kind.ERROR),
    (Asked.METRICS, Kind.DROP),
    (Asked.PROPS, Kind.DROP),
    (Asked.PROPS, Kind.HANG),
    (Asked.EVENTS, Kind.DEAF),
    (Asked.EVENTS, Kind.DROP),
)
_EITHER = frozenset({Kind.LATE, Kind.ERROR, Kind.HANG, Kind.DROP})


def _trouble(rng: random.Random, plan: Plan) -> Trouble:
    at = rng.uniform(0.5, TROUBLE_S - 8)
    party, card = rng.choice(plan.parties), rng.choice(plan.cards)
    match rng.choice(("fault", "fault", "fault", "death", "death", "death", "store", "store", "router", "world")):
        case "fault":
            return _fault(rng, at, card, plan)
        case "death":
            return Trouble(at, "death", party, rng.uniform(0.1, 8), rng.randint(1, 60), flag=rng.random() < 0.3)
        case "store":
            what = rng.choice(("lost before", "lost after", "down", "rollback"))
            return Trouble(at, what, "", rng.uniform(0.3, 9), rng.randint(1, 8))
        case "router":
            what = rng.choice(("router dies", "child dies"))
            return Trouble(at, what, card.name, rng.uniform(0.1, 4))
        case _:
            return Trouble(at, rng.choice(("damage", "stall")), party, rng.uniform(1, 14))


def _steps(seed: int) -> list[Trouble]:
    """Steps of the store's clock, `count` seconds ahead or back: drawn apart, so that the rest of a plan stays."""
    rng = random.Random(f"{seed}/clock")
    far = (-7200, 7200, -3600, 40, -40, 6, -6, 86_400)
    return [
        Trouble(rng.uniform(0.5, TROUBLE_S - 8), "clock", "store", count=rng.choice(far))
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))
    ]


def _fault(rng: random.Random, at: float, card: CardPlan, plan: Plan) -> Trouble:
    verb, kind = rng.choice(_FAULTS)
    if plan.measured and rng.random() < 0.1:
        verb, kind = Asked.UNLOAD, Kind.VRAM_HELD
    fault = Fault(
        verb,
        kind,
        after=kind in _EITHER and rng.random() < 0.4,
        times=rng.choice((1, 1, 2)),
        seconds=rng.uniform(0.2, 6),
        status=rng.choice((500, 503)),
        short=rng.choice((1, 50, 400)),
    )
    return Trouble(at, "fault", card.name, fault=fault)
