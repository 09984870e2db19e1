"""Who is told what a person should know: the apprise URLs of `notify`, fetched once at load where they are only named.

Invariant: an address may hold a secret anywhere, so it appears in no message and no repr; what does is its place in the
configuration and its scheme.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swapper.config.schema import NotifyEntry
from swapper.config.yamltext import Loc

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Recipient:
    """A server to tell, by its apprise URL. `place`: where that is written, like `notify.0`."""

    place: str
    url: str = field(repr=False)
    in_file: bool = False

    @property
    def scheme(self) -> str | None:
        """The kind of service, in lower case; None where the text is no address."""
        found = _SCHEME.match(self.url)
        return found[1].lower() if found else None

    @property
    def name(self) -> str:
        """How it is called where anybody may read it: `notify.0 (ntfy)`."""
        return f"{self.place} ({self.scheme})" if self.scheme else self.place

    @property
    def id(self) -> str:
        """Stands for the address in the store, which holds no secrets."""
        return hashlib.sha256(self.url.encode(errors="replace")).hexdigest()[:16]


def resolve_recipients(
    entries: Sequence[NotifyEntry], environ: Mapping[str, str]
) -> tuple[tuple[Recipient, ...], list[tuple[Loc, str]]]:
    """The recipients with their addresses, and what is wrong with them as (path, sentence)."""
    found: list[Recipient] = []
    problems: list[tuple[Loc, str]] = []
    for index, entry in enumerate(entries):
        loc: Loc = ("notify", index)
        url, problem = _url(entry, environ, loc)
        if problem is None and any(one.url == url for one in found):
            problem = (loc, "is the address of another one, which would be told twice; remove it")
        if problem is None:
            found.append(Recipient(f"notify.{index}", url, in_file=entry.url is not None))
        else:
            problems.append(problem)
    return tuple(found), problems


def _url(entry: NotifyEntry, environ: Mapping[str, str], loc: Loc) -> tuple[str, tuple[Loc, str] | None]:
    given = [one for one in (entry.url, entry.url_env, entry.url_file) if one is not None]
    if len(given) != 1:
        return "", (loc, "needs one of url, url_env and url_file: an apprise URL, or where it is found")
    if entry.url_env is not None:
        url = environ.get(entry.url_env, "").strip()
        return url, None if url else ((*loc, "url_env"), f"the environment variable {entry.url_env} is not set")
    if entry.url_file is not None:
        try:
            url = entry.url_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            return "", ((*loc, "url_file"), f"{entry.url_file} cannot be read: {why}")
        return url, None if url else ((*loc, "url_file"), f"{entry.url_file} is empty")
    url = (entry.url or "").strip()
    return url, None if url else (loc, "is empty; write an apprise URL, like ntfy://ntfy.lan/gpu")
