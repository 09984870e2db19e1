"""What a ComfyUI refuses, and what the one of the tests may be told to lie about (see comfyui.py)."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

Json = dict[str, Any]

OUTPUTS = frozenset({"PreviewImage", "SaveImage"})
NODES = OUTPUTS | {"EmptyImage", "ImageBlur", "KSampler", "LoadImage"}


@dataclass
class Lies:
    """What a test may set. MiB; `keeps_mib`: what no /free gives back; `lose_interrupts`: so many are not heard.

    The next `slow_posts` prompts take a while to be judged, and get their number only then."""

    hold: bool = False
    step_s: float = 0.0
    load_mib: int = 12_288
    idle_mib: int = 300
    keeps_mib: int = 0
    lose_interrupts: int = 0
    free_s: float = 0.0
    slow_posts: int = 0
    silent: bool = False


@web.middleware
async def origin_only(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A browser's page from elsewhere is refused where the host is loopback: Host and Origin must be the same."""
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    if host and origin and is_loopback(urlsplit("//" + host).hostname or "") and urlsplit(origin).netloc != host:
        return web.Response(status=403)
    return await handler(request)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refusal(kind: str, message: str, details: str, node_errors: Json) -> web.Response:
    error: Json = {"type": kind, "message": message, "details": details, "extra_info": {}}
    return web.json_response({"error": error, "node_errors": node_errors}, status=400)


def validate(prompt: Json, targets: list[str] | None) -> tuple[list[str], web.Response | None]:
    """The output nodes to be executed, or the refusal."""
    for name, node in prompt.items():
        if node.get("class_type") not in NODES:
            details = f"Node ID '#{name}'"
            message = f"Cannot execute because node {node.get('class_type')} does not exist."
            return [], refusal("invalid_prompt", message, details, {})
    outputs = [name for name, node in prompt.items() if node["class_type"] in OUTPUTS]
    if not outputs:
        return [], refusal("prompt_no_outputs", "Prompt has no outputs", "", {})
    for name, node in prompt.items():
        if node["class_type"] == "LoadImage" and not node["inputs"].get("image"):
            wrong = {"type": "required_input_missing", "message": "Required input is missing", "details": "image"}
            errors: Json = {name: {"errors": [wrong | {"extra_info": {}}], "dependent_outputs": outputs}}
            message = "Prompt outputs failed validation"
            return [], refusal("prompt_outputs_failed_validation", message, "", errors | {"class_type": "LoadImage"})
    return [name for name in outputs if targets is None or name in targets], None
