"""What vLLM adds to OpenAI's routes: how many calls are in it, and its sleep.

Invariant: it is put to sleep with no call in flight only, and `/is_sleeping` says when that is done, not the answer.
It says the same while only a part of it is awake, so that a wake-up stands in a file from before it begins until all
of it is back, or asleep again.
Source: vLLM's api_router of the sleep endpoints (0.9 to 0.17), its metrics, issues 45520 and 45326. The endpoints take
their arguments from the query; they are there only where the server was started for development.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec

from swapper.errors import BackendDown, BackendError, BackendRefused
from workers.client import ServerClient, decoded

WHO = "vLLM"
HOW = "start it with --enable-sleep-mode and with VLLM_SERVER_DEV_MODE=1 in its environment"
_COUNTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_PAUSE_S = 0.1
SETTLE_S = 10.0
"""What was answered and is not seen, where whoever asks waits without a limit."""


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class Vllm:
    """The engine behind one vLLM. `level` 1 keeps the weights in host memory, 2 reads them from disk again.

    `folder` is for the file of a wake-up.
    """

    def __init__(self, http: ServerClient, level: int, folder: Path) -> None:
        self._http = http
        self._level = level
        self._waking = folder / "waking"

    async def in_flight(self) -> int | None:
        """By its metrics; None where it has none."""
        try:
            text = (await self._http.get("/metrics")).decode(errors="replace")
        except BackendRefused as refused:
            if refused.status == 404:
                return None
            raise
        return gauges(text, _COUNTS)

    async def resting(self) -> bool:
        """By /is_sleeping; one that is awake has done what stood in the file."""
        sleeps = await self.sleeps()
        if not sleeps:
            self.ended()
        return sleeps

    async def sleeps(self) -> bool:
        """What it says itself; one that has no such thing does not sleep. Changes nothing."""
        try:
            return decoded(await self._http.get("/is_sleeping"), _Sleeping, WHO).is_sleeping
        except BackendRefused as refused:
            if refused.status == 404:
                return False
            raise

    def torn(self) -> bool:
        """Whether a wake-up was cut off, so that it has some of its VRAM though it says that it sleeps."""
        return self._waking.exists()

    def ended(self) -> None:
        """What was awake of it is nothing any more, or all: what cannot be removed of that says so once it sleeps."""
        with suppress(OSError):
            self._forget()

    async def rest(self, limit_s: float) -> None:
        """Sleep. Raises BackendRefused with the flags that are missing."""
        try:
            # Older ones know no mode and abort what runs; there is nothing.
            await self._http.post(f"/sleep?level={self._level}&mode=wait", limit_s=limit_s)
        except BackendRefused as refused:
            if refused.status != 404:
                raise
            text = f"{WHO} at {self._http.url} has no /sleep: {HOW}"
            raise BackendRefused(f"{text}, or leave sleep out and let its control stop it", 404) from refused
        await self._until(sleeping=True, limit_s=limit_s)
        try:
            self._forget()
        except OSError as error:
            raise BackendDown(f"{self._waking} cannot be removed ({error.strerror}): remove it") from error

    async def wake(self, limit_s: float) -> None:
        """Wake up; a step that was done already is done again without harm."""
        self._note()
        if self._level == 1:
            await self._http.post("/wake_up", limit_s=limit_s)
        else:
            await self._http.post("/wake_up?tags=weights", limit_s=limit_s)
            await self._http.post("/collective_rpc", {"method": "reload_weights"}, limit_s=limit_s)
            await self._http.post("/wake_up?tags=kv_cache", limit_s=limit_s)
        await self._until(sleeping=False, limit_s=limit_s)
        self.ended()

    def _forget(self) -> None:
        if self._waking.exists():  # a folder that cannot be written refuses also what there is not
            self._waking.unlink(missing_ok=True)

    def _note(self) -> None:
        try:
            self._waking.parent.mkdir(parents=True, exist_ok=True)
            self._waking.touch()
        except OSError as error:
            raise BackendDown(f"{self._waking} cannot be written ({error.strerror}), so nothing was woken") from error

    async def _until(self, *, sleeping: bool, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (limit_s or SETTLE_S)
        while await self.sleeps() is not sleeping:
            if loop.time() >= deadline:
                said = "was put to sleep and is awake" if sleeping else "was woken and still sleeps"
                raise BackendError(f"{WHO} at {self._http.url} {said} after {limit_s:g} s")
            await asyncio.sleep(_PAUSE_S)


def gauges(text: str, names: tuple[str, ...]) -> int | None:
    """The sum of Prometheus gauges over all their labels; None where one of them is not there, or is no number."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            try:
                found[name] = found.get(name, 0) + int(float(line.rpartition(" ")[2]))
            except (ValueError, OverflowError):  # no count: NaN, or another server's
                return None
    return sum(found.values()) if len(found) == len(names) else None
