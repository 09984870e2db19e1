"""Notes on snapshots that must not be restored: each is told of in one run of its model, not at every later swap.

Invariant: a note deletes nothing and keeps nothing out for good: it only says what was told already, and which state
of a file was found damaged. Once the reason is gone the snapshot is offered again, for another reason it is told of
again; its file goes by age or budget as any other. A lost note costs one more telling. Touches `NAME.refused.json`
beside a snapshot, which goes with it. All functions block: call them in threads.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import structlog

from workers.llama.regular import open_regular, rewrite_regular

NOTE_SUFFIX = ".refused.json"
_NOTE_BYTES = 1 << 16
_log = structlog.stdlib.get_logger("workers.llama")

Stamp = tuple[int, int, int, int]
"""Inode, bytes, mtime and ctime (ns) of a file: who writes into it may put the mtime back, never the ctime."""


class _Note(msgspec.Struct, frozen=True):
    """`run`: where it was told (None: nowhere yet); `damaged`: the file's stamp, where its bytes are the reason."""

    why: str
    run: str | None = None
    damaged: Stamp | None = None


class Refusals:
    """The notes in one slot folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def due(self, name: str, why: str, run: str) -> bool:
        """Whether it is to be told of in this run: for this reason it was in no other."""
        note = self._read(name)
        return note is None or note.why != why or note.run in (None, run)

    def tell(self, name: str, why: str, run: str) -> None:
        """It is told of in this run: from now on it is in no other, for this reason."""
        note = self._read(name)
        if note is None or note.why != why:
            note = _Note(why)
        if note.run is None:
            _log.warning("snapshot refused", snapshot=name, why=why)
            self._write(name, msgspec.structs.replace(note, run=run))

    def damaged(self, name: str, why: str, stamp: Stamp) -> None:
        """The bytes of this state of the file are not what was saved."""
        self._write(name, _Note(why, damaged=stamp))

    def damage(self, name: str, stamp: Stamp) -> str | None:
        """What was found wrong with this state of the file."""
        note = self._read(name)
        return note.why if note is not None and note.damaged == stamp else None

    def forget(self, name: str) -> None:
        """The snapshot is written anew."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / (name + NOTE_SUFFIX)

    def _read(self, name: str) -> _Note | None:
        try:
            with open_regular(self._path(name)) as file:
                return msgspec.json.decode(file.read(_NOTE_BYTES), type=_Note)
        except (OSError, ValueError):
            return None

    def _write(self, name: str, note: _Note) -> None:
        with contextlib.suppress(OSError), rewrite_regular(self._path(name), 0o600) as file:
            file.write(msgspec.json.encode(note))
