"""What is known of the conversations of each tenant, in the state folder: where each is, and no word of it.

Invariant: a file a tenant, 0600 in a folder that is 0700, whole or not there; it holds digests, numbers and places, no
text. What is there counts only for the load of the tenant that it names. Everything here blocks: call it in a thread,
one call at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from swapper.snapshots.chain import LINK_BYTES
from swapper.snapshots.conversation import Conversation, Place

MOST = 256
"""So many conversations of a tenant are noted, the most recent ones, with so many links each."""
_SUFFIX, _HALF = ".json", ".tmp"


class _File(msgspec.Struct):
    tenant: str
    load: str
    talks: list[Conversation]


@dataclass(frozen=True, slots=True)
class Note:
    """The conversations of a tenant that are in its server or on disk; `load`: the swap that loaded it, "" unknown."""

    tenant: str
    load: str
    talks: tuple[Conversation, ...]


_file = msgspec.json.Decoder(_File)


def note_of(tenant: str, load: str, talks: Iterable[Conversation]) -> Note:
    """What is worth a note: who is nowhere is not, nor is a request."""
    there = [talk for talk in talks if talk.place is not Place.COLD]
    newest = sorted(there, key=lambda talk: talk.used_ms, reverse=True)[:MOST]
    return Note(tenant, load, tuple(replace(talk, request=None) for talk in newest))


class Notes:
    """The notes in `folder`, which is made by the first write."""

    __slots__ = ("_folder",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, note: Note) -> None:
        """Take the place of the tenant's note. Raises OSError, on a full disk too; the one before stays then."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        path = self._file(note.tenant)
        half = path.with_suffix(_HALF)
        half.unlink(missing_ok=True)
        talks = [replace(talk, links=talk.links.shortened(MOST)) for talk in note.talks]
        try:
            with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(_File(note.tenant, note.load, talks)))
            half.replace(path)
        except OSError:
            half.unlink(missing_ok=True)
            raise

    def load(self, tenants: Iterable[str]) -> Iterator[Note]:
        """What an earlier process noted of these tenants; every other note, and what is no good, is removed.

        Raises OSError when the folder cannot be read; a file that cannot be is passed over.
        """
        if not self._folder.is_dir():
            return
        wanted = {self._file(tenant) for tenant in tenants}
        for path in sorted(self._folder.iterdir()):
            note = _read(path) if path in wanted else None
            if note is not None:
                yield note
            elif path.suffix in (_SUFFIX, _HALF):
                with suppress(OSError):
                    path.unlink()

    def _file(self, tenant: str) -> Path:
        return self._folder / f"{xxh3_64_hexdigest(tenant.encode())}{_SUFFIX}"


def _read(path: Path) -> Note | None:
    try:
        found = _file.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    sound = all(talk.links.packed and len(talk.links.packed) % LINK_BYTES == 0 for talk in found.talks)
    return Note(found.tenant, found.load, tuple(found.talks)) if sound else None
