"""The show: two long conversations, a media job takes the card and gives it back, both go on; then the same read anew.

Invariant: every figure was measured in this run. A conversation counts as warm only when swapper proved it from an
answer and the answer's own `cache_n` says so too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from swapper.client import SwapperClient
from swapper.demo.stage import CARD, MODEL, Stage
from swapper.demo.talk import Talk, Turn, story
from swapper.errors import BackendError, SwapperError

STORY_TOKENS = (3_900, 4_100)
NEXT = "Next?"
SWAP_LIMIT_S = 60.0
WORK_S = 2.0

Json = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the run showed: each conversation's next turn and the same one read anew, both swaps, the lease."""

    turns: tuple[Turn, ...]
    reread: tuple[Turn, ...]
    out: Json
    back: Json
    lease: Json
    wait_ms: float
    job: str

    @property
    def kept(self) -> list[Json]:
        """The conversations of the swap back, in the order of the turns: each turn's is the one nearest in tokens."""
        talks: list[Json] = list(self.back["conversations"])
        if len(talks) != len(self.turns):
            return talks
        return [min(talks, key=lambda talk: abs(talk["tokens"] - turn.prompt)) for turn in self.turns]

    @property
    def ok(self) -> bool:
        """Both came back warm, by swapper's proof and by the answer's own count."""
        kept = self.kept
        return len({talk["snapshot"] for talk in kept}) == len(self.turns) == len(STORY_TOKENS) and all(
            talk["result"] == "warm" and turn.cache_n >= 0.99 * talk["tokens"]
            for talk, turn in zip(kept, self.turns, strict=True)
        )


async def play(on: Stage, say: Say) -> Outcome:
    """The whole show. Raises SwapperError when a part of it fails."""
    talks = [Talk(MODEL) for _ in STORY_TOKENS]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        async with on.swapper() as server, SwapperClient(server.url) as swapper:
            for number, (talk, tokens) in enumerate(zip(talks, STORY_TOKENS, strict=True), 1):
                say(f"conversation {number}: {tokens:,} tokens are read for the first time")
                await talk.say(session, server.url, story(number, tokens))
            lease, wait_ms, job = await _media_job(swapper, say)
            await _handover(swapper, lease["id"], proved=False)
            say("the model is back; both conversations go on")
            turns = [await talk.ask(session, server.url, NEXT) for talk in talks]
            out, back = await _handover(swapper, lease["id"], proved=True)
        say("for comparison, without swapper: unload, load, and both turns are read anew")
        await reload_bare(session, on.router)
        reread = [await talk.ask(session, on.router, NEXT) for talk in talks]
    return Outcome(tuple(turns), tuple(reread), out, back, lease, wait_ms, job)


async def _media_job(swapper: SwapperClient, say: Say) -> tuple[Json, float, str]:
    """Lease the card, work on it, give it back."""
    start = time.perf_counter()
    say("a media job asks for the whole card")
    request = {"card": CARD, "label": "demo media job", "ttl_s": 60}
    lease = await swapper.request_lease(request, wait_s=30)
    if lease["state"] != "granted":
        lease = await swapper.wait(lease["id"], limit_s=SWAP_LIMIT_S)
    if lease["state"] != "granted":
        raise SwapperError(f"the lease was not granted: {lease['explain']}")
    wait_ms = (time.perf_counter() - start) * 1000
    say(f"{lease['explain']}; the job works")
    try:
        job = await work()
    finally:
        await swapper.release(lease["id"], token=lease["token"])
    return await swapper.lease(lease["id"]), wait_ms, job


async def work() -> str:
    """Really work for about two seconds: an ffmpeg encode to nowhere, or a busy child where there is none that works.

    The picture comes at its own pace (`-re`), so that it takes as long on any machine.
    """
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is not None:
        source = ("-re", "-f", "lavfi", "-t", str(WORK_S), "-i", "testsrc2=size=1280x720:rate=30")
        if await _ended_well(ffmpeg, "-v", "error", "-nostdin", *source, "-c:v", "mpeg4", "-f", "null", "-"):
            return "ffmpeg encode"
    busy = f"import time\nend = time.process_time() + {WORK_S}\nwhile time.process_time() < end: sum(range(9999))"
    if await _ended_well(sys.executable, "-c", busy):
        return "busy child process"
    raise SwapperError("the media job failed, and so did a child process that only computes")


async def _ended_well(*command: str) -> bool:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        return await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _handover(swapper: SwapperClient, lease_id: str, *, proved: bool) -> tuple[Json, Json]:
    """Both swaps of the lease once they have ended; with `proved`, once each conversation is known warm or cold.

    Raises SwapperError when that takes longer than SWAP_LIMIT_S.
    """
    try:
        async with asyncio.timeout(SWAP_LIMIT_S):
            async for event in swapper.events(since="0"):
                if event.type not in ("swap", "conversation"):
                    continue
                swaps = [s for s in await swapper.swaps(limit=10) if s["lease"] == lease_id and s["outcome"]]
                out = next((swap for swap in swaps if swap["from"]), None)
                back = next((swap for swap in swaps if swap["to"] and not swap["from"]), None)
                if out and back and not (proved and _unproved(back)):
                    return out, back
    except TimeoutError:
        pass
    raise SwapperError(f"the conversations did not come back within {SWAP_LIMIT_S:.0f} s")


def _unproved(swap: Json) -> bool:
    return any(talk["result"] == "unproved" for talk in swap["conversations"])


async def reload_bare(session: aiohttp.ClientSession, router: str) -> None:
    """Unload and load the model at llama-server itself, as one does without swapper: the conversations are gone.

    Raises BackendError when it does not do so.
    """
    try:
        async with session.get(f"{router}/models/sse") as changes:
            await _post(session, f"{router}/models/unload")
            await _until(changes, "unloaded")
            await _post(session, f"{router}/models/load")
            await _until(changes, "loaded")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BackendError(f"llama-server at {router} broke off: {str(error) or type(error).__name__}") from error


async def _post(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(url, json={"model": MODEL}) as answer:
        if answer.status != 200:
            raise BackendError(f"llama-server answered {answer.status} to {url}: {(await answer.text())[:300]}")


async def _until(changes: aiohttp.ClientResponse, status: str) -> None:
    async for line in changes.content:
        if line.startswith(b"data:"):
            data: Json = json.loads(line.removeprefix(b"data:")).get("data") or {}
            if data.get("status") == status:
                return
    raise BackendError(f"llama-server's events ended before the model was {status}")
