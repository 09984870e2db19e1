"""What of our clients' prompts is in ComfyUI's queue: noted, taken out, put back, posted anew to one that died over it.

Invariant: a prompt is on disk before it is taken out of the queue, and there until ComfyUI has it again; one that runs
or has run is never posted a second time, unless ComfyUI died over it, and then once. Ids, places and all else that came
with a prompt stay as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec
import structlog

from swapper.comfyui import taken
from swapper.comfyui.taken import Prompt, Taken
from swapper.errors import BackendRefused
from workers.comfyui.http import ComfyHttp, Item

_MANY = 64
DEATHS = 2
"""A prompt that ran when ComfyUI died so often is not posted again: it would go on to."""

log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True)
class Renders:
    """See the module text. Raises what ComfyHttp does while ComfyUI is away."""

    http: ComfyHttp
    taken: Taken
    sent: dict[str, Prompt] = field(default_factory=dict[str, Prompt])
    posted: int = 0
    """So many were taken by ComfyUI so far."""
    _witness: str | None = None

    def accepted(self, raw: bytes, answer: bytes) -> None:
        """ComfyUI took a prompt, and answered so."""
        body, told = taken.read(raw), taken.read(answer)
        if body is None or told is None or "prompt_id" not in told:
            return
        prompt_id, number = str(told["prompt_id"]), float(told.get("number") or 0)
        self.sent[prompt_id] = Prompt(prompt_id, number, taken.again(body, prompt_id, number))
        self.posted += 1

    async def tidy(self, remaining: int, posted: int) -> None:
        """Forget those that have ended: so many were in the queue while so many had been taken."""
        if remaining == 0 and posted == self.posted:
            self._end(tuple(self.sent))
        elif len(self.sent) > remaining + _MANY:
            before = tuple(self.sent)
            queue = await self.http.queue()
            there = {item.id for item in (*queue.running, *queue.pending)}
            self._end([one for one in before if one not in there])

    def _end(self, ids: Iterable[str]) -> None:
        for one in ids:
            self.sent.pop(one, None)
            self._witness = one

    async def forget(self, ids: Collection[str] | None) -> None:
        """A client takes these prompts out itself (None: all that wait)."""
        gone = [one.id for one in self.taken.prompts()] if ids is None else ids
        await self._remove(gone)
        for one in ids or ():
            self.sent.pop(one, None)

    async def restore(self) -> None:
        """Have in the queue what belongs there: what was taken out, and what a ComfyUI that died had."""
        queue = await self.http.queue()
        there = {item.id for item in (*queue.running, *queue.pending)}
        missing = [one for one in self.sent.values() if one.id not in there and not await self.http.known(one.id)]
        if missing and len(missing) == len(self.sent) and not await self._remembers():
            await self._keep_lost(missing)
        for one in missing:
            del self.sent[one.id]
        for one in self.taken.prompts():
            if one.id not in there and not await self.http.known(one.id):
                await self._post(one)
            else:
                self.sent[one.id] = one
            await self._remove([one.id])

    async def _remembers(self) -> bool:
        """Whether it is still the process that executed what we last saw the end of."""
        return self._witness is not None and await self.http.known(self._witness)

    async def _keep_lost(self, lost: Iterable[Prompt]) -> None:
        """ComfyUI died with these in its queue. The first ran, and may be why."""
        first, *rest = sorted(lost, key=lambda one: one.place)
        ran = msgspec.structs.replace(first, deaths=first.deaths + 1)
        if ran.deaths >= DEATHS:
            log.warning("ComfyUI ended again over a prompt, which is given up", prompt=ran.id)
        back = [ran, *rest] if ran.deaths < DEATHS else rest
        log.warning("ComfyUI ended with prompts in its queue; they are posted again", prompts=len(back))
        await self._add(back)

    async def _post(self, one: Prompt) -> None:
        try:
            await self.http.post(one.body)
        except BackendRefused as refused:
            log.warning("ComfyUI does not take a prompt again that it had taken", prompt=one.id, why=str(refused))
            return
        self.sent[one.id] = one

    async def take_out(self) -> int:
        """Take all that waits out of ComfyUI's queue, onto the disk first; how many."""
        waiting = (await self.http.queue()).pending
        if not waiting:
            return 0
        ours = [self._prompt(item) for item in waiting]
        await self._add(ours)
        await self.http.delete([one.id for one in ours])
        running = {item.id for item in (await self.http.queue()).running}
        began = [one.id for one in ours if one.id in running or await self.http.known(one.id)]
        await self._remove(began)  # its turn came before it was taken out
        for one in ours:
            if one.id not in began:
                self.sent.pop(one.id, None)
        return len(ours) - len(began)

    def _prompt(self, item: Item) -> Prompt:
        """As it was posted, where that is known: ComfyUI does not tell all of it (no keys for its paid nodes)."""
        return self.sent.get(item.id) or Prompt(item.id, item.number, item.body())

    async def _add(self, prompts: Iterable[Prompt]) -> None:
        try:
            await asyncio.to_thread(self.taken.add, list(prompts))
        except OSError as error:
            log.error("prompts taken out of ComfyUI's queue are in memory alone", why=error.strerror)

    async def _remove(self, ids: Iterable[str]) -> None:
        try:
            await asyncio.to_thread(self.taken.remove, list(ids))
        except OSError as error:  # who reads it finds them in the queue, or executed
            log.error("the file of prompts taken out of ComfyUI's queue cannot be written", why=error.strerror)
