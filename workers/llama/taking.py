"""A slot of a running model taken for a conversation from disk: an empty one, else what lies there is saved first.

Invariant: nothing is pushed out that is not in a file; what somebody goes on with meanwhile is never taken. Two that
come at once get two slots. It knows the slots of one server; how a slot is saved and restored it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from swapper.errors import BackendBusy, BackendError, BackendRefused
from swapper.snapshots.manifest import Manifest
from workers.backend import Displaced, Restored, Room, SaveArgs, Saved, SlotUse, Talk, WouldPushOut
from workers.llama.http import Model, RouterHttp, Slot
from workers.llama.keeping import Keeper
from workers.llama.seats import Run, as_it_came, came_before, given_away, may_hold, task_of, use_of, whose

_ATTEMPTS = 3
"""So often a slot is looked for whose conversation nobody goes on with while it is being saved."""
Saves = Callable[[str, Model, SaveArgs, Callable[[int], Talk | None]], Awaitable[Saved]]
"""(tenant, model, what to save, whose it is by the tokens that were saved)."""
Puts = Callable[[Model, Manifest, Slot, int], Awaitable[Restored]]
"""(model, snapshot, slot, the last task of any slot; -1 where no call asked for it)."""


class Taking:
    """Makes room, and restores into it."""

    def __init__(
        self, http: RouterHttp, keeper: Keeper, run: Callable[[Model], Awaitable[Run]], save: Saves, put: Puts
    ) -> None:
        self._http = http
        self._keeper = keeper
        self._run = run
        self._save = save
        self._put = put
        self._lock = asyncio.Lock()

    async def put(self, tenant: str, model: Model, manifest: Manifest, room: Room | None) -> Restored:
        """See `Backend.restore`, slot -1; the snapshot was found fit. Raises BackendError, or WouldPushOut."""
        async with self._lock:  # two must not be given the same slot
            return await self._put_anywhere(tenant, model, manifest, room)

    async def _put_anywhere(self, tenant: str, model: Model, manifest: Manifest, room: Room | None) -> Restored:
        run = await self._run(model)
        if room is not None and (made_room := await self._keeper.manifest(room.name)) is not None:
            return await self._again(model, manifest, made_room)
        for _ in range(_ATTEMPTS):
            slots = await self._http.slots(model.name)
            if (there := came_before(run, slots, manifest)) is not None:
                return Restored(there.id, manifest.tokens, 0.0)
            after, slot = max(map(task_of, slots), default=-1), given_away(run, slots, *_known(room))
            if slot is None:
                raise BackendBusy(f"{manifest.snapshot} was not restored: every slot of {model.name} is at work")
            if not may_hold(run, slot):
                return await self._put(model, manifest, slot, after)
            if room is None:
                raise BackendRefused(f"{manifest.snapshot} was not restored: no slot of {model.name} is empty")
            _say_first(run, slots, slot, room)
            displaced = await self._displaced(tenant, model, slots, slot, room)
            if displaced is not None:
                return await self._exchanged(model, manifest, slot, after, displaced)
        said = f"whatever was to make room for it in {model.name} was gone on with meanwhile"
        raise BackendBusy(f"{manifest.snapshot} was not restored: {said}")

    async def _again(self, model: Model, manifest: Manifest, made_room: Manifest) -> Restored:
        """Who died over this restore had saved what was to make room already: the same slot is taken, no other."""
        slot = (await self._http.slots(model.name))[made_room.slot]
        if slot.is_processing or slot.n_prompt_tokens not in (None, made_room.tokens, manifest.tokens):
            taken = f"slot {slot.id}, which was to be given to it, was gone on with meanwhile"
            raise BackendRefused(f"{manifest.snapshot} was not restored: {taken}")
        there = made_room
        displaced = Displaced(there.snapshot, there.tokens, there.bytes, there.id, there.links, there.used_ms)
        return await self._exchanged(model, manifest, slot, task_of(slot), displaced)

    async def _displaced(
        self, tenant: str, model: Model, slots: Sequence[Slot], slot: Slot, room: Room
    ) -> Displaced | None:
        """Save what a slot holds; None where somebody used the slot meanwhile, so that it is not to be taken."""
        run = await self._run(model)

        def talk_of(tokens: int) -> Talk | None:
            return whose(run, slots, slot, tokens, room.talks)

        args = SaveArgs(slot.id, room.name, strategy=_strategy(run, slot, room), token=room.token)
        saved = await self._save(tenant, model, args, talk_of)
        now = (await self._http.slots(model.name))[slot.id]
        if now.is_processing or task_of(now) != task_of(slot):
            await self._keeper.drop(tenant, room.name)
            return None
        if saved.tokens:
            self._keeper.replace_soon(tenant, room.name, beside=False)
        talk = talk_of(saved.tokens) or Talk("")
        return Displaced(saved.snapshot, saved.tokens, saved.bytes, talk.id, talk.links, talk.used_ms)

    async def _exchanged(
        self, model: Model, manifest: Manifest, slot: Slot, after: int, displaced: Displaced
    ) -> Restored:
        """Restore over what was saved from this slot just now; if that fails, it comes back."""
        try:
            restored = await self._put(model, manifest, slot, after)
        except BackendError:
            back = await self._keeper.manifest(displaced.snapshot)
            if back is not None:
                with suppress(BackendError):  # it stays on disk
                    await self._put(model, back, slot, -1)
            raise
        return replace(restored, displaced=displaced if displaced.tokens else None)


def _known(room: Room | None) -> tuple[Sequence[Talk], SlotUse | None]:
    return ((), None) if room is None else (room.talks, room.takes)


def _say_first(run: Run, slots: Sequence[Slot], slot: Slot, room: Room) -> None:
    """Whoever wants to know it is told, and nothing done; what lies as it came from disk is as good as it was there."""
    if room.tells and room.takes != use_of(slot) and as_it_came(run, slot) is None:
        talk = whose(run, slots, slot, slot.n_prompt_tokens or 0, room.talks)
        raise WouldPushOut(use_of(slot), talk.id if talk is not None else "")


def _strategy(run: Run, slot: Slot, room: Room) -> str:
    """What the slot was made ready by before it is saved."""
    came = as_it_came(run, slot)
    return came.strategy if came is not None else room.strategy if room.takes == use_of(slot) else "slots"
