"""Which slots of a running model hold something, and which one a conversation from disk may have.

Invariant: pure. A slot that never ran a task is known to be empty only in a process we loaded. What came from disk and
was not used since has no task of its own: it counts as used when it was, or, where a call is about to use it, now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swapper.snapshots.manifest import Manifest
from workers.backend import SlotUse, Talk
from workers.llama.answer import last_was_ours, only_trace
from workers.llama.child import Child
from workers.llama.http import Slot


@dataclass(frozen=True, slots=True)
class Arrived:
    """A snapshot that came into a slot. `task`: the last one the slot had run; `after`: the last one of any slot.

    `after` is -1 where no call asked for it.
    """

    manifest: Manifest
    task: int
    after: int

    def talk(self, slot: Slot, tokens: int) -> Talk | None:
        """Whose conversation it is, if it is still there as it came."""
        there = self.manifest
        untouched = task_of(slot) == self.task and tokens == there.tokens
        return Talk(there.id, there.links, there.tokens, there.used_ms) if untouched and there.id else None


@dataclass(slots=True)
class Run:
    """What we know of the process `key`. `ours`: we loaded it, so a slot without a task is empty, unless restored.

    `arrived`: what was restored into each slot. `cannot_save`: it said so.
    """

    key: str
    child: Child | None
    environ: tuple[str, ...] = ()
    ours: bool = False
    cannot_save: bool = False
    arrived: dict[int, Arrived] = field(default_factory=dict[int, Arrived])

    def restored(self, slot: int) -> str | None:
        """The snapshot that came into a slot, if one did."""
        arrived = self.arrived.get(slot)
        return arrived.manifest.snapshot if arrived is not None else None


def task_of(slot: Slot) -> int:
    """The last task of a slot, -1 before its first."""
    return -1 if slot.id_task is None else slot.id_task


def in_use(run: Run, slots: Sequence[Slot]) -> tuple[SlotUse, ...]:
    """Slots that may hold a conversation."""
    return tuple(SlotUse(slot.id, slot.n_prompt_tokens or 0) for slot in slots if may_hold(run, slot))


def may_hold(run: Run, slot: Slot) -> bool:
    """Whether something worth saving may be in it."""
    if slot.n_prompt_tokens is None:
        return not run.ours or slot.id in run.arrived
    return slot.n_prompt_tokens > 0 and (slot.id in run.arrived or not only_trace(slot))


def unfit(slots: Sequence[Slot], slot: int, manifest: Manifest) -> str | None:
    """Why this snapshot should not be put into this slot now."""
    if not 0 <= slot < len(slots):
        return f"there is no slot {slot} among {len(slots)}"  # the server would silently wrap it round
    there = slots[slot]
    if there.is_processing:
        return f"slot {slot} is at work for somebody else"
    again = last_was_ours(there) and there.n_prompt_tokens == manifest.tokens  # put there by one who died thereafter
    if there.n_prompt_tokens and not again and not only_trace(there):
        return f"slot {slot} was taken: it holds {there.n_prompt_tokens} tokens already"
    return None


def cheapest(run: Run, slots: Sequence[Slot]) -> Slot | None:
    """The idle slot that is given away first: an empty one, else the one unused for longest; None: all are at work."""
    idle = [slot for slot in slots if not slot.is_processing]
    return min(idle, key=lambda slot: _value(run, slot), default=None)


def _value(run: Run, slot: Slot) -> tuple[bool, int, int, int]:
    arrived = run.arrived.get(slot.id)
    used = max(task_of(slot), arrived.after if arrived is not None else -1)
    saved = arrived.manifest.last_ms if arrived is not None and arrived.task == task_of(slot) else 0
    return may_hold(run, slot), used, saved, slot.id


def whose(talks: Sequence[Talk], tokens: int) -> Talk | None:
    """The one conversation that has so many tokens in its slot; None where none has, or several have."""
    found = [talk for talk in talks if talk.tokens == tokens]
    return found[0] if len(found) == 1 and tokens > 0 else None
