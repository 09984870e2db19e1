"""What the gate answers by itself, in ComfyUI's own shape where a program reads it, as a page where a person does.

Invariant: values only. Everything else that a client hears through the gate was said by ComfyUI.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from aiohttp import web

RETRY_S = 30
RELOAD_S = 5


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a prompt is not taken: HTTP status, one word, one sentence, and seconds after which it may be tried again."""

    status: int
    type: str
    message: str
    retry_s: int | None = None

    def response(self) -> web.Response:
        """As ComfyUI words a prompt that it does not take."""
        error: dict[str, object] = {
            "type": self.type,
            "message": self.message,
            "details": self.message,
            "extra_info": {},
        }
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        return web.json_response({"error": error, "node_errors": {}}, status=self.status, headers=headers)


def no_card(reason: str) -> Refusal:
    """The lease could not be had, or ended before the prompt's turn."""
    return Refusal(503, "gpu_busy", f"The GPU was not given to ComfyUI: {reason}", RETRY_S)


def queue_full(waiting: int) -> Refusal:
    """Too many wait already."""
    return Refusal(429, "queue_full", f"{waiting} wait already. Try again later.", RETRY_S)


def too_much(what: str) -> Refusal:
    """The bodies of those that wait would take too much memory."""
    return Refusal(413 if what.startswith("This") else 429, "too_large", what)


def stopped(pause_s: float) -> Refusal:
    """Its body did not go on."""
    return Refusal(408, "body_stopped", f"No byte of this prompt came for {pause_s:g} s.")


def bad_class(text: str) -> Refusal:
    """X-Swapper-Class is none."""
    return Refusal(400, "bad_class", text)


def broke(why: str) -> Refusal:
    """ComfyUI went away over this prompt, more than once."""
    return Refusal(502, "comfyui_failed", f"ComfyUI ended while it took this prompt: {why}")


def away(request: web.Request, sentence: str) -> web.Response:
    """What a client that is no prompt hears while nobody is there: a page that comes again, or the sentence."""
    headers = {"Retry-After": str(RELOAD_S), "Cache-Control": "no-store"}
    if request.method != "GET" or "text/html" not in request.headers.get("Accept", ""):
        return web.Response(status=503, text=sentence + "\n", headers=headers)
    said = html.escape(sentence)
    page = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{RELOAD_S}">'
        f"<title>ComfyUI is away</title></head><body><p>{said}</p><p>This page looks again every {RELOAD_S} s.</p>"
        "</body></html>"
    )
    return web.Response(status=503, text=page, content_type="text/html", headers=headers)
