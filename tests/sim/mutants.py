"""The product with one mechanism taken away, by name: some seed must tell.

Invariant: nothing but the mechanism is changed, and it is there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import workers.verbs
from swapper.core import answers, clock, keeping, machine, policy
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.draft import Draft
from swapper.gateway import proof
from swapper.store.memory_library import Library
from tests.sim.jobs import JobDouble
from tests.sim.mutants_beside import BESIDE
from workers import marks, observe, onoff
from workers.backend import Reading, TenantState, Unread
from workers.control import ExitStatus, Phase
from workers.vacate import Vacated


def _nothing(*_: object) -> None:
    """What is missing decides nothing."""


def _fence(patch: pytest.MonkeyPatch) -> None:
    """The agent takes every command for a new one."""

    def verdict(self: Any, pair: object) -> object:  # noqa: ANN401
        del self, pair
        return marks.Fresh()

    patch.setattr(marks._LaneRecord, "verdict", verdict)  # pyright: ignore[reportPrivateUsage]
    patch.setattr(marks.Marks, "answer", _nothing)


def _proof(patch: pytest.MonkeyPatch) -> None:
    """`vacate` believes that the card is free."""

    async def believed(*_: object) -> Vacated:
        return Vacated(True, 1 << 20, ())

    patch.setattr(workers.verbs, "vacate", believed)


def _reuse(patch: pytest.MonkeyPatch) -> None:
    """Every answer proves reuse."""

    def judge(*_: object) -> tuple[ProofResult, None]:
        return ProofResult.WARM, None

    patch.setattr(proof, "judge", judge)


def _compare_and_set(patch: pytest.MonkeyPatch) -> None:
    """A commit is not held against the cards' versions, nor the tokens against the counter."""
    whole: Callable[..., Any] = Library._conflict  # pyright: ignore[reportPrivateUsage]

    def conflict(self: Library, now_ms: int, commit: Any) -> Any:  # noqa: ANN401
        return whole(self, now_ms, replace(commit, cards=(), tokens=()))

    patch.setattr(Library, "_conflict", conflict)


def _resume(patch: pytest.MonkeyPatch) -> None:
    """After a restart nothing is sent again."""
    patch.setattr(machine, "resume", _nothing)


def _grace(patch: pytest.MonkeyPatch) -> None:
    """After a gap no lease gets its time back."""
    whole: Callable[..., Any] = clock.moved

    def moved(world: Any, spec: Any, step_ms: int = 0) -> Any:  # noqa: ANN401
        return whole(world, spec, step_ms) if step_ms else None

    patch.setattr(clock, "moved", moved)


def _clock(patch: pytest.MonkeyPatch) -> None:
    """No step of the store's clock is noticed."""

    def none(then: clock.Look, now: clock.Look) -> int:
        del then, now
        return 0

    patch.setattr(clock, "step_between", none)


def _recall(patch: pytest.MonkeyPatch) -> None:
    """What is to be recalled before it is saved is said to be saved, and is not."""

    def believed(draft: Draft, tenant: str) -> bool:
        for talk in draft.swap.conversations:
            if talk.tenant == tenant and talk.recall and not talk.saved:
                keeping.mark(draft, talk.snapshot, recall=False, saved=True)
        return False

    patch.setattr(keeping, "recall", believed)


def _label(patch: pytest.MonkeyPatch) -> None:
    """Each conversation is saved under the name of the one before."""
    whole, last = keeping.save_args, list[Any]()

    def args(talk: Conversation) -> Any:  # noqa: ANN401
        told = whole(talk)
        if not talk.head:
            return told
        named, last[:] = dict(told, conversation=last[0]) if last else told, [told["conversation"]]
        return named

    patch.setattr(keeping, "save_args", args)


def _believed(patch: pytest.MonkeyPatch) -> None:
    """What was told to stop is taken for gone, whatever its engine shows."""
    seen: Callable[..., Any] = onoff.OnOff.observe

    async def gone(_: object) -> None:
        pass

    async def observe(self: Any) -> Any:  # noqa: ANN401
        states = await seen(self)
        gone = self._leaving or self._away.known
        return dict.fromkeys(states, TenantState.UNLOADED) if gone else states

    patch.setattr(onoff.OnOff, "_gone", gone)
    patch.setattr(onoff.OnOff, "observe", observe)


def _away(patch: pytest.MonkeyPatch) -> None:
    """What an engine that does not answer runs is taken for gone."""
    patch.setitem(onoff._STATES, Phase.UNREACHABLE, TenantState.STOPPED)  # pyright: ignore[reportPrivateUsage]


def _stays(patch: pytest.MonkeyPatch) -> None:
    """What does not come up is left there."""

    async def left(_: object) -> None:
        pass

    patch.setattr(onoff.OnOff, "_take_back", left)


def _spent(patch: pytest.MonkeyPatch) -> None:
    """What is on a card by leases of its own stays when they are over."""

    def as_wished(card: object, spent: object, choice: Any) -> Any:  # noqa: ANN401
        del card, spent
        return choice

    patch.setattr(policy, "_leave_too", as_wished)


def _crowded(patch: pytest.MonkeyPatch) -> None:
    """For what runs out of memory nobody leaves."""

    def nobody(*_: object) -> bool:
        return False

    patch.setattr(answers, "_crowded", nobody)


def _unread(patch: pytest.MonkeyPatch) -> None:
    """A card that cannot be read is free."""
    read: Callable[..., Any] = observe.Sight.reading

    async def reading(self: Any, *args: Any) -> Any:  # noqa: ANN401
        found = await read(self, *args)
        return Reading(1 << 20, 0, 1 << 20) if isinstance(found, Unread) else found

    patch.setattr(observe.Sight, "reading", reading)


def _twice(patch: pytest.MonkeyPatch) -> None:
    """The record of a job's process is not looked for before it is started."""
    patch.setattr(JobDouble, "begun", False)


def _unheld(patch: pytest.MonkeyPatch) -> None:
    """A job's process counts as gone without having been seen to be."""

    async def at_once(_: object) -> ExitStatus:
        return ExitStatus(1, None, 0)

    async def told(*_: object) -> None:
        pass

    patch.setattr(JobDouble, "ended", at_once)
    patch.setattr(JobDouble, "end", told)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "fence": _fence,
    "proof": _proof,
    "reuse": _reuse,
    "compare-and-set": _compare_and_set,
    "resume": _resume,
    "grace": _grace,
    "clock": _clock,
    "recall": _recall,
    "label": _label,
    "believed": _believed,
    "away": _away,
    "stays": _stays,
    "spent": _spent,
    "crowded": _crowded,
    "unread": _unread,
    "twice": _twice,
    "unheld": _unheld,
    **BESIDE,
}


@contextmanager
def mutated(name: str | None) -> Generator[None]:
    """Within it the mechanism is missing; None: nothing is."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTANTS[name](patch)
        yield
