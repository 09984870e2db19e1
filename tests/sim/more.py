"""What else is on the cards of a plan, and what befalls it: drawn apart, so that the rest of a plan stays.

Invariant: as `plan.draw`: everything is chosen here, from the seed alone, before anything runs.
"""

from __future__ import annotations

import random
from dataclasses import replace

from swapper.core.errand import Verb
from tests.sim.beside import beside
from tests.sim.plan import TROUBLE_S, BoxPlan, CardPlan, HandPlan, JobPlan, Plan, Trouble

_BOX_TROUBLES = (
    *("box starts", "box starts", "box dies", "box dies", "engine away", "engine away"),
    *("box lies", "box lies", "box stays", "box grows", "box hangs"),
)


def more(plan: Plan) -> Plan:
    """The plan with all that is drawn apart."""
    cards = tuple(_rendering(plan.seed, _boxed(plan.seed, card)) for card in plan.cards)
    if plan.controlled:  # else nobody tells that it was the memory
        cards = tuple(_narrow(plan.seed, card) for card in cards)
    if plan.measured:
        cards = tuple(
            replace(card, learned=bool(random.Random(f"{plan.seed}/{card.name}/told").getrandbits(1))) for card in cards
        )
    plan = replace(plan, cards=cards)
    troubles = [*plan.troubles, *_box_troubles(plan), *_card_troubles(plan)]
    plan = replace(plan, hands=_hands(plan))
    return beside(replace(plan, jobs=_jobs(plan), troubles=tuple(sorted(troubles, key=lambda trouble: trouble.at))))


def _boxed(seed: int, card: CardPlan) -> CardPlan:
    """A thing beside the models, on some cards; the card is larger by it where it is always to be there."""
    rng = random.Random(f"{seed}/{card.name}/box")
    if rng.random() >= 0.4:
        return card
    box = BoxPlan(
        f"box{card.name.removeprefix('gpu')}",
        rng.choice((2000, 3000)),
        default=rng.random() < 0.6,
        start_s=rng.uniform(0.05, 2),
        stop_s=rng.uniform(0.05, 1.5),
    )
    return replace(card, boxes=(box,), total_mib=card.total_mib + (box.need_mib if box.default else 0))


def _jobs(plan: Plan) -> tuple[JobPlan, ...]:
    rng = random.Random(f"{plan.seed}/jobs")
    return tuple(
        JobPlan(
            f"job{n}",
            rng.uniform(0, 25),
            rng.choice((None, rng.choice(plan.cards).name)),
            rng.choice((None, 2000, 5000)),
            rng.uniform(0.1, 8),
            rng.choice((3_600_000, 3_600_000, 3000)),
            rng.choice((None, None, rng.uniform(0.1, 8))),
            rng.choice((0, 0, 0, 1)),
            seen=rng.random() < 0.8,
            missing=rng.random() < 0.1,
        )
        for n in range(rng.choice((0, 0, 1, 2)))
    )


def _hands(plan: Plan) -> tuple[HandPlan, ...]:
    """What an operator does beside it all."""
    rng = random.Random(f"{plan.seed}/hands")
    found: list[HandPlan] = []
    for _ in range(rng.choice((0, 0, 0, 1, 2, 4))):
        card = rng.choice(plan.cards)
        names = [model.name for model in card.models] + [box.name for box in card.boxes if not box.by_lease]
        verb, drain_s = rng.choice(list(Verb)[:4]), rng.choice((None, None, 0.0, 2.0))
        at, force = rng.uniform(0.5, TROUBLE_S - 5), verb is Verb.VACATE and rng.random() < 0.5
        found.append(HandPlan(at, verb, card.name, rng.choice(names), drain_s if verb is Verb.UNLOAD else None, force))
    return tuple(found)


def _rendering(seed: int, card: CardPlan) -> CardPlan:
    """One that is there by leases of its own, on some cards, for what comes to its gate."""
    rng = random.Random(f"{seed}/{card.name}/render")
    if rng.random() >= 0.3:
        return card
    batches = [(rng.uniform(1, 25), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
    prompts = sorted((at + nth * 0.2, rng.uniform(0.2, 2)) for at, count in batches for nth in range(count))
    need = rng.choice((3000, 5000))
    box = BoxPlan(
        f"render{card.name.removeprefix('gpu')}",
        need,
        default=False,
        start_s=rng.uniform(0.05, 2),
        stop_s=rng.uniform(0.05, 1.5),
        by_lease=True,
        part_mib=rng.choice((None, need)),
        prompts=tuple(prompts),
    )
    return replace(card, boxes=(*card.boxes, box))


def _narrow(seed: int, card: CardPlan) -> CardPlan:
    """A card with less room than the needs say, on some: enough for all that is always to be there, and little more."""
    rng = random.Random(f"{seed}/{card.name}/room")
    if rng.random() >= 0.5:
        return card
    always = [one.need_mib for one in (*card.models, *card.boxes) if one.default]
    most = max((sum(always), *(model.need_mib for model in card.models)))
    return replace(card, room_mib=most + rng.choice((100, 1500)))


def _card_troubles(plan: Plan) -> list[Trouble]:
    """Of cards that are measured: somebody else holds `count` MiB of one, it is read late, or cannot be read."""
    rng = random.Random(f"{plan.seed}/measured")
    return [
        Trouble(
            rng.uniform(0.0, TROUBLE_S - 8),
            rng.choice(("stranger", "stranger", "unread", "late")),
            card.name,
            rng.choice((rng.uniform(0.2, 4), rng.uniform(4, 15), rng.uniform(15, 45))),
            rng.choice((300, 3000, 6000)),
        )
        for card in (plan.cards if plan.measured else ())
        for _ in range(rng.choice((0, 0, 1, 2)))
    ]


def _box_troubles(plan: Plan) -> list[Trouble]:
    rng = random.Random(f"{plan.seed}/boxes")
    found: list[Trouble] = []
    for card in plan.cards:
        for box in card.boxes:
            found += [
                Trouble(
                    rng.uniform(0.5, TROUBLE_S - 8),
                    rng.choice(_BOX_TROUBLES),
                    box.name,
                    rng.choice((rng.uniform(0.2, 4), rng.uniform(4, 25))),
                    rng.randint(1, 2),
                    flag=rng.random() < 0.5,
                )
                for _ in range(rng.choice((0, 1, 2, 3)))
            ]
    return found
