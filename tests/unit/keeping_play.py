"""A tenant that leaves and comes back in the card machine: what its gateway and agent say, what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swapper.core import keeping
from swapper.core.conversations import Conversation, Strategy
from swapper.core.orders import Command, Report
from tests.support.play import MED, Play, spec, tenant

Offer = Callable[[Play], Sequence[Mapping[str, object]]]
A, B, C = "a" * 32, "b" * 32, "c" * 32


def talk(id: str, tokens: int, used_ms: int, **more: object) -> dict[str, object]:
    return {"id": id, "links": [id], "tokens": tokens, "used_ms": used_ms, "recallable": True, **more}


def leaving(
    talks: Sequence[Mapping[str, object]],
    slots: Sequence[Mapping[str, int]],
    strategies: Sequence[str] = ("slots", "replay"),
    fingerprint: str = "f1",
    **traits: bool,
) -> Play:
    """A lease wants the card that med serves; its drain is answered."""
    play = Play(spec(tenant("med", **traits)), MED)
    play.enqueue("a")
    play.decide()
    leave(play, talks, slots, strategies, fingerprint)
    return play


def leave(
    play: Play,
    talks: Sequence[Mapping[str, object]],
    slots: Sequence[Mapping[str, int]],
    strategies: Sequence[str] = ("slots", "replay"),
    fingerprint: str = "f1",
) -> None:
    play.say(play.pending("close"), {"in_flight": 0, "talks": talks})
    play.say(play.pending("drain"), {"slots": slots, "strategies": strategies, "fingerprint": fingerprint})


def saves(play: Play) -> list[Command]:
    return [c for c in play.swap.pending if c.verb == "save"]


def save_all(play: Play) -> list[tuple[str, Mapping[str, object]]]:
    """Answer recalls and saves until the release; what was commanded, in order."""
    done: list[tuple[str, Mapping[str, object]]] = []
    while play.swap.stage == "save":
        command = play.swap.pending[0]
        done.append((command.verb, command.args))
        if command.verb == keeping.RECALL:
            play.answer(command, slot=1, tokens=1500, cache_n=1499, prompt_n=1)
        else:
            play.answer(command, tokens=1500, bytes=3 << 20)
    return done


def back(play: Play, offer: Offer, n_slots: int = 2, **load: object) -> Play:
    """The lease ends and the resident comes back, its agent offering snapshots; stops when the gateway is to open."""
    play.run()
    snapshots = offer(play)
    play.end("a")
    play.decide()
    play.run(until="load")
    play.say(play.pending("load"), {"n_slots": n_slots, "snapshots": snapshots, **load})
    play.run(until="open", restore={"tokens": 1500})
    return play


def offered(play: Play) -> list[dict[str, object]]:
    return [
        {"snapshot": c.snapshot, "slot": c.slot, "tokens": c.tokens, "bytes": c.bytes, "id": c.head, "links": [c.head]}
        for c in sorted(play.card.saved, key=lambda c: -c.used_ms)
        if c.strategy != Strategy.REPLAY
    ]


def nothing(_: Play) -> list[dict[str, object]]:
    return []


def lines(play: Play) -> dict[str, Conversation]:
    return {c.head: c for c in play.swap.conversations}


def proof(snapshot: str, **data: object) -> Report:
    return Report("gateway:g1", "gpu0", MED, 0, 0, "proof", "ok", data={"snapshot": snapshot, **data})
