"""The process that speaks to a notification server by apprise: one question on standard input, one answer on output.

Invariant: an address may hold a secret anywhere: it comes in on standard input alone, and no part of it goes out, since
each is blanked in whatever apprise says. It ends by itself, whatever the server does. Run as a file, it imports nothing
of swapper: apprise is slow to import, and a server that does not answer keeps a thread waiting, both not in serve.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import signal
import sys
from typing import Any
from urllib.parse import unquote

_SHORTEST = 3
"""Parts of an address that are shorter are no secrets, and stand in many words."""
_PARTS = re.compile(r"[^\w.~-]+")


class _Kept(logging.Handler):
    """What apprise warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage().strip().rstrip("."))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Of `look` (at `url`): `problem`, why apprise cannot use it, and `secret`, whether apprise would hide part of it.

    Of `send` (`title`, `body`, `severity` as well): `problem`, why it was not sent. A problem is None where there is
    none. Whatever apprise and its plugins raise is a problem: this is their supervisor.
    """
    kept = _Kept()
    log = logging.getLogger("apprise")
    log.addHandler(kept)
    log.propagate = False
    url = question["url"]
    try:
        found = _sent(question, kept) if question["act"] == "send" else _looked_at(url, kept)
    except Exception as error:
        found = {"problem": f"apprise failed: {type(error).__name__}: {error}"}
    finally:
        log.removeHandler(kept)
    problem = found["problem"]
    return found | {"problem": problem and without(url, problem)}


def _looked_at(url: str, kept: _Kept) -> dict[str, Any]:
    service = _service(url)
    if service is None:
        return {"problem": f"is not understood by apprise{_why(kept)}", "secret": False}
    return {"problem": None, "secret": service.url(privacy=True) != service.url(privacy=False)}


def _sent(question: dict[str, Any], kept: _Kept) -> dict[str, Any]:
    service = _service(question["url"])
    if service is None:
        return {"problem": f"it is not understood by apprise{_why(kept)}"}
    apprise: Any = importlib.import_module("apprise")
    everybody = apprise.Apprise()
    everybody.add(service)
    ok = everybody.notify(
        body=question["body"],
        title=question["title"],
        notify_type=apprise.NotifyType(question["severity"]),
        body_format=apprise.NotifyFormat.TEXT,
    )
    return {"problem": None if ok else "; ".join(dict.fromkeys(kept.said)) or "apprise does not say why"}


def _service(url: str) -> Any:  # noqa: ANN401
    """Apprise's object for the address, which keeps nothing on disk; None where it understands it not."""
    apprise: Any = importlib.import_module("apprise")
    asset = apprise.AppriseAsset(app_id="swapper", app_desc="swapper", app_url="", storage_mode="memory")
    return apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)


def _why(kept: _Kept) -> str:
    return f" ({'; '.join(dict.fromkeys(kept.said))})" if kept.said else ""


def without(url: str, text: str) -> str:
    """The text with each part of the address blanked, as it is written and with its %XX decoded."""
    rest = url.partition("://")[2] or url
    parts = {part for form in (rest, unquote(rest)) for part in _PARTS.split(form) if len(part) >= _SHORTEST}
    for part in sorted(parts, key=len, reverse=True):
        text = re.sub(re.escape(part), "****", text, flags=re.IGNORECASE)
    return text


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    signal.alarm(int(question["limit_s"]) + 1)  # whoever asked may be gone
    print(json.dumps(answer(question)), flush=True)
    signal.alarm(2)  # threads of apprise that still wait for their server


if __name__ == "__main__":
    main()
