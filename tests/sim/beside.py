"""Which servers of other kinds are on the cards of a plan, who calls them, and what befalls them: drawn apart.

Invariant: as `plan.draw`: everything is chosen here, from the seed alone, before anything runs.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.sim.plan import TROUBLE_S, BoxPlan, CallPlan, CardPlan, Plan, Trouble

_BEFALLS = {
    "vllm": ("box dies", "engine away", "box starts", "deaf", "deaf", "torn", "torn", "mute", "mute"),
    "ollama": ("box dies", "engine away", "vram late", "vram late", "direct", "direct", "direct", "deaf"),
    "comfyui": ("deaf", "deaf", "prompt", "prompt"),
}


def beside(plan: Plan) -> Plan:
    """The plan with them."""
    plan = replace(plan, cards=tuple(_served(plan.seed, card) for card in plan.cards))
    calls = sorted((*plan.calls, *_calls(plan)), key=lambda call: call.at)
    troubles = sorted((*plan.troubles, *_troubles(plan)), key=lambda trouble: trouble.at)
    return replace(plan, calls=tuple(calls), troubles=tuple(troubles))


def _served(seed: int, card: CardPlan) -> CardPlan:
    """One more server on some cards; and what renders on it is a ComfyUI on some.

    None where there is less room than the needs say: for who runs out of memory one more leaves, and not two.
    """
    rng = random.Random(f"{seed}/{card.name}/served")
    boxes = tuple(replace(box, kind="comfyui") if box.by_lease and rng.random() < 0.5 else box for box in card.boxes)
    kind = rng.choice((None, None, None, "vllm", "ollama"))
    if kind is None or card.room_mib is not None:
        return replace(card, boxes=boxes)
    number, needs = card.name.removeprefix("gpu"), (rng.choice((3000, 5000)), rng.choice((2000, 5000)))
    models = tuple((f"{name}{number}", need) for name, need in zip(("x", "y"), needs, strict=True))
    box = BoxPlan(
        f"{kind}{number}",
        needs[0],
        default=False,
        start_s=rng.uniform(0.05, 1),
        stop_s=rng.uniform(0.05, 1),
        kind=kind,
        models=models[: rng.choice((1, 2))] if kind == "ollama" else (),
        level=rng.choice((1, 2)),
    )
    return replace(card, boxes=(*boxes, box))


def names(box: BoxPlan) -> tuple[str, ...]:
    """What clients call at it."""
    return tuple(name for name, _ in box.models) if box.kind == "ollama" else (box.name,) if box.kind == "vllm" else ()


def _calls(plan: Plan) -> list[CallPlan]:
    rng = random.Random(f"{plan.seed}/served calls")
    return [
        CallPlan(
            rng.uniform(0, TROUBLE_S - 5),
            name,
            1,
            stream=False,
            tokens=rng.choice((2, 50, 400)),
            hang_up_s=rng.choice((8.0, 60.0, 60.0)),
            chat=True,
        )
        for card in plan.cards
        for box in card.boxes
        for name in names(box)
        for _ in range(rng.randint(1, 4))
    ]


def _troubles(plan: Plan) -> list[Trouble]:
    rng = random.Random(f"{plan.seed}/served troubles")
    return [
        Trouble(
            rng.uniform(0.5, TROUBLE_S - 8),
            rng.choice(_BEFALLS[box.kind]),
            box.name,
            rng.choice((rng.uniform(0.2, 3), rng.uniform(3, 20))),
            rng.randint(1, 2),
            flag=rng.random() < 0.5,
        )
        for card in plan.cards
        for box in card.boxes
        if box.kind != "none"
        for _ in range(rng.choice((0, 1, 2, 3)))
    ]
