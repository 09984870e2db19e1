"""The prompts that wait at a gate: in the order they came, each posted once the one before it has its answer.

Invariant: a place is waiting, being posted, or gone; at most one is being posted, and only while the line is open.
No HTTP, no store, no clock.
"""

from __future__ import annotations

import asyncio

from swapper.comfyui.answers import Refusal
from swapper.core.types import WorkClass


class Place:
    """One prompt in the line. Made by `Line.join` only."""

    __slots__ = ("_refusal", "_woken", "klass", "size")

    def __init__(self, klass: WorkClass, size: int) -> None:
        self.klass = klass
        self.size = size
        self._woken = asyncio.Event()
        self._refusal: Refusal | None = None

    async def turn(self) -> Refusal | None:
        """Wait until it is to be posted (None), or why it will not be."""
        await self._woken.wait()
        return self._refusal

    def wake(self, refusal: Refusal | None = None) -> None:
        """Its turn has come, or never will (Line's business)."""
        self._refusal = refusal
        self._woken.set()

    def sleep(self) -> None:
        """Wait again (Line's business)."""
        self._woken = asyncio.Event()


class Line:
    """See the module text. `changed` is set whenever somebody joins or leaves, or has been posted."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._waiting: list[Place] = []
        self._posting: Place | None = None
        self._open = False

    def __len__(self) -> int:
        """How many wait, the one that is being posted among them."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether one is being posted; also one whose client has left meanwhile."""
        return self._posting is not None

    @property
    def bytes(self) -> int:
        """What the bodies of those that wait take."""
        return sum(place.size for place in self._waiting)

    @property
    def klass(self) -> WorkClass:
        """The most urgent class of those that wait; normal where nobody does."""
        return min((place.klass for place in self._waiting), key=lambda one: one.rank, default=WorkClass.NORMAL)

    @property
    def open(self) -> bool:
        """Whether those in it are posted."""
        return self._open

    @open.setter
    def open(self, value: bool) -> None:
        self._open = value
        self._pump()

    def join(self, klass: WorkClass, size: int) -> Place:
        """Take the last place."""
        place = Place(klass, size)
        self._waiting.append(place)
        self.changed.set()
        self._pump()
        return place

    def leave(self, place: Place) -> None:
        """Its client has its answer, or left. What is being posted for it goes on. Safe to repeat."""
        if place in self._waiting:
            self._waiting.remove(place)
            self.changed.set()

    def posted(self, place: Place) -> None:
        """It has its answer: the next one's turn."""
        self.leave(place)
        self._next(place)

    def again(self, place: Place) -> None:
        """It could not be posted: it waits on where it was, if its client is still there."""
        place.sleep()
        self._next(place)

    def refuse(self, refusal: Refusal) -> None:
        """Answer all who wait, but for the one that is being posted."""
        for place in [one for one in self._waiting if one is not self._posting]:
            place.wake(refusal)
            self.leave(place)

    def _next(self, place: Place) -> None:
        if self._posting is place:
            self._posting = None
        self.changed.set()
        self._pump()

    def _pump(self) -> None:
        if self._open and self._posting is None and self._waiting:
            self._posting = self._waiting[0]
            self._posting.wake()
