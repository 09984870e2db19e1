"""`swapper check` on a ComfyUI: is it one, and can anybody get past its gate.

Invariant: one GET that loads nothing. One that swapper starts itself need not answer now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast
from urllib.parse import urlsplit

from swapper.config import TenantEntry
from swapper.errors import BackendDown, BackendGone, BackendRefused
from workers.comfyui.http import ComfyHttp

Found = tuple[bool, str]
"""Whether it is an error, and the sentence."""

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_EVERYWHERE = "0.0.0.0,::"
_OWN_NETWORK = frozenset({"docker", "kubernetes"})
"""Controls of what has a network of its own, in which it has to listen everywhere."""


async def reach_comfyui(server: str, entry: TenantEntry) -> list[Found]:
    """Ask it; what is wrong with it, or with what is written of it."""
    here = f"tenants.{server}.url: {entry.url}"
    http = ComfyHttp(entry.url or "")
    try:
        stats = await http.stats()
    except BackendDown as down:
        if entry.control != "attach":
            return []
        why = "nobody listens there" if isinstance(down, BackendGone) else str(down)
        return [(True, f"{here}: {why}; start ComfyUI, or correct the address")]
    except BackendRefused as refused:
        return [(True, f"{here}: {refused}; correct the address, or the kind")]
    finally:
        await http.close()
    system, devices = cast("dict[str, object]", stats["system"]), cast("list[dict[str, object]]", stats["devices"])
    told = system.get("argv")
    argv = [str(one) for one in cast("list[object]", told)] if isinstance(told, list) else []
    return [*_past_the_gate(server, entry, argv), *_devices(here, devices)]


def _past_the_gate(server: str, entry: TenantEntry, argv: Sequence[str]) -> Iterator[Found]:
    """Prompts that are posted to ComfyUI itself run beside whoever has the card."""
    host = urlsplit(entry.url or "").hostname or ""
    listens = _value(argv, "--listen", _EVERYWHERE)
    strange = [one for one in (listens or "127.0.0.1").split(",") if one not in _LOOPBACK]
    past = f"prompts posted there get past the gate {entry.gate}, and run beside whoever has the card"
    if entry.control in _OWN_NETWORK and host not in _LOOPBACK:
        mend = "publish its port on 127.0.0.1 alone (-p 127.0.0.1:8188:8188), or in a network that only swapper shares"
        yield False, f"tenants.{server}.url: others than swapper may reach {host}: {past}; {mend}"
    elif strange and entry.control not in _OWN_NETWORK:
        text = f"tenants.{server}: ComfyUI listens on {', '.join(strange)}: {past}"
        yield False, f"{text}; start it with --listen 127.0.0.1"
    if _value(argv, "--enable-cors-header", "*") is not None:
        text = f"tenants.{server}: ComfyUI was started with --enable-cors-header: any page in a browser here may post"
        yield False, f"{text} to it and to the gate; leave it out"


def _devices(here: str, devices: Sequence[dict[str, object]]) -> Iterator[Found]:
    if devices and all(one.get("type") == "cpu" for one in devices):
        yield False, f"{here}: ComfyUI runs on the CPU and would take its card for nothing; start it without --cpu"


def _value(argv: Sequence[str], option: str, bare: str) -> str | None:
    """The value of an option, `bare` where it stands without one; None where it is not there."""
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        following = argv[place + 1] if place + 1 < len(argv) else "--"
        return value if equals else bare if following.startswith("--") else following
    return None
