"""Conversations come back warm through a handover of a real llama-server of every kind of model, and it is proved."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

import pytest

from tests.support.server import KINDS, Json, Server


def text(seed: int, size: int = 1500) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ijklmnop", k=size))


def cache_n(answer: Json) -> int:
    return cast("dict[str, int]", answer["timings"])["cache_n"]


def said(answer: Json) -> str:
    return cast("list[dict[str, dict[str, str]]]", answer["choices"])[0]["message"]["content"]


def handed_on(answer: str) -> str:
    """An answer as it is in the next request: without its front (reasoning, say) and the blanks around it.

    Its end would be no test: the last token of an answer is never in the slot.
    """
    return answer.strip()[2:]


def prompt_n(answer: Json) -> int:
    """Tokens of the whole prompt."""
    return cache_n(answer) + cast("dict[str, int]", answer["timings"])["prompt_n"]


def handover(server: Server) -> None:
    """A job takes the card and gives it back; the resident serves again."""
    lease = server.lease("job", wait=60)
    assert lease["state"] == "granted", lease
    server.release(lease)
    server.until(lambda status: [c for c in cast("list[Json]", status["cards"]) if c["phase"] == "steady"])


def all_are(lines: list[Json], name: str, value: object, count: int) -> list[Json]:
    """The lines, once there are so many and each has the value."""
    return lines if [line[name] for line in lines] == [value] * count else []


def results(server: Server) -> list[Json]:
    """The conversations of the last swap back."""
    back = next(swap for swap in server.swaps() if swap["to"])
    return cast("list[Json]", back["conversations"])


@pytest.mark.parametrize("unified", [False, True], ids=["own-cells", "kv-unified"])
@pytest.mark.parametrize("model", ["alpha", "lfm"])
def test_five_conversations_on_two_slots_come_back_warm_after_a_handover(
    serve: Callable[..., Server], model: str, unified: bool
) -> None:
    server = serve(model, unified=unified)
    first = [said(server.chat(model, text(seed))) for seed in range(5)]
    handover(server)
    for seed in (4, 2, 0, 1, 3):
        answer = server.chat(model, text(seed), handed_on(first[seed]), "and then?")
        assert cache_n(answer) >= 0.95 * 1500, (seed, answer["timings"], server.log_path.read_text()[-2000:])
    server.until(lambda _: all_are(results(server), "result", "warm", 5))
    assert {c["strategy"] for c in results(server)} == {KINDS[model]}


def test_a_sliding_window_model_is_read_again_before_anybody_asks(serve: Callable[..., Server]) -> None:
    server = serve("gemma")
    first = [said(server.chat("gemma", text(seed))) for seed in range(2)]
    handover(server)
    server.until(lambda _: all_are(results(server), "restored", True, 2))
    for seed in (0, 1):
        answer = server.chat("gemma", text(seed), handed_on(first[seed]), "and then?")
        assert cache_n(answer) >= 0.95 * 1500
    server.until(lambda _: all_are(results(server), "result", "warm", 2))
    assert {c["strategy"] for c in results(server)} == {"replay"}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("model", ["alpha", "lfm"])
def test_conversations_that_make_room_for_one_another_while_they_are_used_all_stay_warm(
    serve: Callable[..., Server], model: str, slots: int
) -> None:
    server, many = serve(model, slots=slots), slots + 2
    talks = [[text(seed)] for seed in range(many)]
    answers = [server.chat(model, *talk) for talk in talks]
    handover(server)
    for turn in range(3):
        for nth, talk in enumerate(talks):
            before = answers[nth]
            talk += [handed_on(said(before)), f"and then, {turn}?"]
            answers[nth] = server.chat(model, *talk)
            least = prompt_n(before) - len("<|assistant|>")
            assert cache_n(answers[nth]) >= least, (
                turn,
                nth,
                answers[nth]["timings"],
                server.log_path.read_text()[-2000:],
            )
