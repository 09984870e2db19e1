"""Sending, and looking whether an address can be sent to: asked of a process of its own (speaker.py), within a limit.

Invariant: an address may hold a secret anywhere, so nothing of one leaves here but its scheme, and the whole of it on
the standard input of that process. A server that is dead or slow keeps that process waiting, and nobody else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from swapper.config.recipients import Recipient
from swapper.notify import speaker
from swapper.notify.book import Message
from swapper.notify.worth import Severity

SEND_S = 20.0
"""So long a message may take; who takes longer has not got it, as far as we know, and is sent it again."""
HOW = "how each service is written: https://github.com/caronc/apprise/wiki"


@dataclass(frozen=True, slots=True)
class Looked:
    """What apprise makes of an address: why it cannot use it, and whether it holds what apprise would hide."""

    problem: str | None
    secret: bool = False


async def look(recipient: Recipient) -> Looked:
    """Whether apprise understands the address; nothing is sent."""
    if recipient.scheme is None:
        return Looked(f"is no address, like ntfy://HOST/TOPIC; {HOW}")
    said = await _ask({"act": "look", "url": recipient.url}, SEND_S)
    problem = said["problem"]
    return Looked(f"{problem}; {HOW}" if problem else None, bool(said.get("secret")))


async def send(recipient: Recipient, message: Message, limit_s: float = SEND_S) -> str | None:
    """Send it. Why that failed, in words that hold nothing of the address; None once it was sent."""
    what = {"title": message.title, "body": message.body, "severity": str(message.severity)}
    return (await _ask({"act": "send", "url": recipient.url, **what}, limit_s))["problem"]


def trial_message(now_ms: int) -> Message:
    """What `swapper check --notify` sends."""
    text = "This is a test message of swapper check --notify: what swapper has to tell comes here."
    return Message("swapper: a test", text, Severity.INFO, now_ms)


async def _ask(question: dict[str, object], limit_s: float) -> dict[str, Any]:
    """What the process answers, else `problem` alone. It is gone afterwards, also where we are cancelled."""
    program, pipe = (sys.executable, "-P", speaker.__file__), asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *program, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        return {"problem": f"the process that sends it cannot be started: {error.strerror}"}
    try:
        async with asyncio.timeout(limit_s):
            told, _ = await process.communicate(json.dumps({**question, "limit_s": limit_s}).encode())
    except TimeoutError:
        return {"problem": f"it did not answer within {limit_s:g} s"}
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        return cast("dict[str, Any]", json.loads(told))
    except ValueError:
        return {"problem": f"the process that sends it ended without an answer (status {process.returncode})"}
