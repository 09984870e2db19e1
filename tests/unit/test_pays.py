"""A conversation is saved only where that pays: on a slow disk it is read again from its text, where that is kept."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from swapper.core.conversations import Conversation
from swapper.core.saving import FELT_MS
from tests.support.play import MED, Play, spec, tenant
from workers.llama.pace import Paces

A, B = "a" * 32, "b" * 32
SLOW = {"read": 100.0, "keep": 900.0}
"""ms for 1,000 tokens: a fast card beside a slow disk."""
TOKENS = 10_000


def talk(id: str, slot: int, *, recallable: bool = True) -> dict[str, object]:
    return {"id": id, "links": [id], "tokens": TOKENS, "used_ms": slot, "recallable": recallable, "slot": slot}


def left(
    *talks: Mapping[str, object],
    costs: Mapping[str, float] | None = None,
    tokens: int = TOKENS,
    strategies: tuple[str, ...] = ("slots", "replay"),
    **traits: bool,
) -> dict[int, Conversation]:
    """Slot -> what is planned for it when med leaves, both slots in use."""
    play = Play(spec(tenant("med", **traits)), MED)
    play.enqueue("a")
    play.decide()
    play.say(play.pending("close"), {"in_flight": 0, "talks": [{**one, "tokens": tokens} for one in talks]})
    said = {"slots": [{"slot": 0, "tokens": tokens}, {"slot": 1, "tokens": tokens}], "strategies": strategies}
    play.say(play.pending("drain"), {**said, "fingerprint": "f1", **({} if costs is None else {"costs": costs})})
    return dict(enumerate(sorted(play.swap.conversations, key=lambda c: c.head or "z")))


def ways(found: Mapping[int, Conversation]) -> list[tuple[str, str, bool]]:
    return [(c.head, c.strategy, c.snapshot.startswith("replay:")) for c in found.values()]


AS_FILES = [(A, "slots", False), (B, "slots", False)]
AS_TEXTS = [(A, "replay", True), (B, "replay", True)]


@pytest.mark.parametrize(
    ("costs", "kept"),
    [
        pytest.param(SLOW, AS_TEXTS, id="the disk is slow"),
        pytest.param(None, AS_FILES, id="nothing was measured yet"),
        pytest.param({"read": 900.0, "keep": 100.0}, AS_FILES, id="reading is slow"),
        pytest.param({"read": 100.0, "keep": 100.0}, AS_FILES, id="it is the same"),
    ],
)
def test_what_is_read_faster_than_saved_and_restored_is_kept_as_a_text(
    costs: Mapping[str, float] | None, kept: list[tuple[str, str, bool]]
) -> None:
    assert ways(left(talk(A, 0), talk(B, 1), costs=costs)) == kept


def test_what_nobody_would_feel_is_saved_all_the_same() -> None:
    felt = FELT_MS * 1000 / (SLOW["keep"] - SLOW["read"]) / 2
    assert ways(left(talk(A, 0), talk(B, 1), costs=SLOW, tokens=int(felt) + 1)) == AS_TEXTS
    assert ways(left(talk(A, 0), talk(B, 1), costs=SLOW, tokens=int(felt) - 1)) == AS_FILES


def test_one_whose_text_is_not_kept_is_saved_from_its_slot_however_long_that_takes() -> None:
    found = left(talk(A, 0), talk(B, 1, recallable=False), costs=SLOW)
    assert ways(found) == [(A, "replay", True), (B, "slots", False)]
    assert found[1].slot == 1


def test_a_slot_that_nobody_knows_is_saved_however_long_that_takes() -> None:
    assert ways(left(talk(A, 0), costs=SLOW)) == [(A, "replay", True), ("", "slots", False)]


@pytest.mark.parametrize(
    "instead",
    [
        pytest.param({"save_required": True}, id="conversations are required"),
        pytest.param({"strategies": ("slots",)}, id="another way is not wanted"),
    ],
)
def test_nothing_is_left_to_a_text_where(instead: dict[str, object]) -> None:
    assert ways(left(talk(A, 0), talk(B, 1), costs=SLOW, **instead)) == AS_FILES  # pyright: ignore[reportArgumentType]


def test_costs_are_told_once_enough_was_measured_and_as_long_as_that_is_not_old() -> None:
    paces = Paces()
    assert paces.costs("med", 10_000, 1.0, now_ms=0) is None
    paces.saved("med", 1_999, 10.0, now_ms=0)
    assert paces.costs("med", 10_000, 1.0, now_ms=0) is None
    paces.saved("med", 4_000, 800.0, now_ms=0)
    assert paces.costs("med", 1_999, 1.0, now_ms=0) is None
    first = paces.costs("med", 10_000, 1.0, now_ms=0)
    assert first is not None
    assert (first.read, first.keep) == (100.0, pytest.approx(2 * 805 / 4.9995))
    paces.restored("med", 4_000, 40.0, now_ms=0)
    both = paces.costs("med", 10_000, 1.0, now_ms=0)
    assert both is not None
    assert both.keep == pytest.approx(805 / 4.9995 + 10)
    assert paces.costs("alpha", 10_000, 1.0, now_ms=0) is None
    assert paces.costs("med", 10_000, 1.0, now_ms=24 * 3_600_000) is None


def test_what_was_measured_last_counts_most() -> None:
    paces = Paces()
    for ms in (8_000.0, 8_000.0, 80.0, 80.0, 80.0, 80.0):
        paces.saved("med", 8_000, ms, now_ms=0)
    found = paces.costs("med", 10_000, 1.0, now_ms=0)
    assert found is not None
    assert found.keep < 2 * 100
