"""Which slots of a running model hold something, and which one a conversation from disk may have.

Invariant: pure. A slot that never ran a task is known to be empty only in a process we loaded. What came from disk and
was not used since has no task of its own: it counts as used when it was, or, where a call is about to use it, now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swapper.core.conversations import WORTH_TOKENS
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

    def untouched(self, slot: Slot) -> bool:
        """Whether nothing has run in the slot since."""
        return task_of(slot) == self.task

    def talk(self, slot: Slot, tokens: int) -> Talk | None:
        """Whose conversation it is, if it is still there as it came."""
        there = self.manifest
        same = self.untouched(slot) and tokens == there.tokens
        return Talk(there.id, there.links, there.tokens, there.used_ms) if same and there.id else None


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
    return tuple(replace(use_of(slot), gone_on=_gone_on(run, slot)) for slot in slots if may_hold(run, slot))


def _gone_on(run: Run, slot: Slot) -> bool:
    arrived = run.arrived.get(slot.id)
    return arrived is not None and not arrived.untouched(slot)


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


def disturbed(slots: Sequence[Slot], slot: int, tokens: int) -> str | None:
    """Why a slot should not be saved beside the calls: somebody is at work, or it holds something else by now."""
    at_work = [other.id for other in slots if other.is_processing]
    if at_work:
        return f"slots at work: {', '.join(map(str, at_work))}"
    there = slots[slot].n_prompt_tokens or 0
    return f"slot {slot} holds {there} tokens by now, not {tokens}" if there != tokens else None


def came_before(run: Run, slots: Sequence[Slot], manifest: Manifest) -> Slot | None:
    """The slot this very snapshot came into and may still be in, as it was or gone on with.

    Who asks again has not heard of it: brought once more it would stand there older than it is.
    """
    for slot in slots:
        arrived = run.arrived.get(slot.id)
        if arrived is None or arrived.manifest.snapshot != manifest.snapshot:
            continue
        if arrived.untouched(slot) or (slot.n_prompt_tokens or 0) >= manifest.tokens:
            return slot
    return None


def use_of(slot: Slot) -> SlotUse:
    """What it holds, as the server shows it."""
    return SlotUse(slot.id, slot.n_prompt_tokens or 0)


def as_it_came(run: Run, slot: Slot) -> Manifest | None:
    """What lies there as it came from disk."""
    arrived = run.arrived.get(slot.id)
    return arrived.manifest if arrived is not None and arrived.untouched(slot) else None


def given_away(
    run: Run, slots: Sequence[Slot], talks: Sequence[Talk] = (), takes: SlotUse | None = None
) -> Slot | None:
    """The idle slot that is given away first, None where all are at work.

    The one that was made ready to be taken, if it still is as it was; else an empty one, else the one unused for
    longest whose conversation is known: what nobody can name would never be asked back from its file.
    """
    idle = [slot for slot in slots if not slot.is_processing]
    ready = next((slot for slot in idle if use_of(slot) == takes), None)
    return ready or min(idle, key=lambda slot: _value(run, slots, slot, talks), default=None)


def _value(run: Run, slots: Sequence[Slot], slot: Slot, talks: Sequence[Talk]) -> tuple[bool, bool, int, int, int]:
    arrived = run.arrived.get(slot.id)
    used = max(task_of(slot), arrived.after if arrived is not None else -1)
    saved = arrived.manifest.last_ms if arrived is not None and arrived.task == task_of(slot) else 0
    return may_hold(run, slot), not _to_come_back(run, slots, slot, talks), used, saved, slot.id


def _to_come_back(run: Run, slots: Sequence[Slot], slot: Slot, talks: Sequence[Talk]) -> bool:
    """Whether what is in it can be asked back, or is read again in no time, and nobody waits for it just now."""
    tokens, arrived = slot.n_prompt_tokens, run.arrived.get(slot.id)
    if arrived is not None and arrived.untouched(slot):
        return arrived.after < 0  # else a call is about to use it
    if tokens is None:  # it came from disk, and was not used: an earlier process saw to that
        return any(talk.slot == slot.id for talk in talks)
    return tokens < WORTH_TOKENS or whose(run, slots, slot, tokens, talks) is not None


def whose(run: Run, slots: Sequence[Slot], slot: Slot, tokens: int, talks: Sequence[Talk]) -> Talk | None:
    """Whose conversation of so many tokens is in a slot; None where that cannot be told.

    What lies there as it came from disk is its manifest's. Else it is the one of `talks` that has so many tokens and
    is not known to be in another slot, where no other slot holds as many but those of which that is known. A wrong
    name would bring a stranger's conversation back for it later.
    """
    arrived = run.arrived.get(slot.id)
    if arrived is not None and arrived.untouched(slot) and arrived.manifest.tokens == tokens:
        return arrived.talk(slot, tokens)
    fitting = [talk for talk in talks if talk.tokens == tokens > 0]
    here = [talk for talk in fitting if talk.slot == slot.id]
    if here:
        return here[0]
    seated = {talk.slot for talk in fitting}
    others = [other for other in slots if other.id != slot.id]
    elsewhere = {
        run.arrived[o.id].manifest.id for o in others if o.id in run.arrived and run.arrived[o.id].untouched(o)
    }
    fitting = [talk for talk in fitting if talk.slot is None and talk.id not in elsewhere]
    rivals = any(_holds(run, other) == tokens and other.id not in seated for other in others)
    return fitting[0] if len(fitting) == 1 and not rivals else None


def _holds(run: Run, slot: Slot) -> int:
    """Tokens in a slot, as far as is known."""
    arrived = run.arrived.get(slot.id)
    return arrived.manifest.tokens if arrived is not None and arrived.untouched(slot) else slot.n_prompt_tokens or 0
