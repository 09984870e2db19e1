"""Requests of conversations in the state folder, so that they outlive the process: one file each, off by default.

Invariant: the folder is 0700, its files 0600, together they take no more than the budget, and a file is whole or not
there. A file that is none of ours, or is cut, is removed when it is read. Everything here blocks: call it in a thread,
one call at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from xxhash import xxh3_64_hexdigest

from swapper.snapshots.conversation import Conversation, Request

_SUFFIX, _HALF = ".request", ".tmp"


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a file; the body follows."""

    tenant: str
    id: str
    path: str
    tokens: int
    used_ms: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Remembered:
    """A conversation as it was written: `tokens` left in its slot, `used_ms` of its last use."""

    tenant: str
    id: str
    request: Request
    tokens: int
    used_ms: int


_head = msgspec.json.Decoder(_Head)


class Bodies:
    """The requests in `folder`, at most `limit` bytes of bodies; the folder is made by the first write."""

    __slots__ = ("_folder", "_limit")

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def write(self, tenant: str, talk: Conversation) -> None:
        """Keep the request of a conversation. Raises OSError, on a full disk too; nothing is left of it then."""
        request = talk.request
        if request is None:
            return
        digest = xxh3_64_hexdigest(request.body)
        head = _Head(tenant, talk.id, request.path, talk.tokens, talk.used_ms, len(request.body), digest)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        path = self._file(tenant, talk.id)
        half = path.with_suffix(_HALF)
        half.unlink(missing_ok=True)
        try:
            with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(head) + b"\n")
                file.write(request.body)
            half.replace(path)
        except OSError:
            half.unlink(missing_ok=True)
            raise

    def remove(self, tenant: str, name: str) -> None:
        """Forget the request of a conversation, also one that is not there. Raises OSError."""
        self._file(tenant, name).unlink(missing_ok=True)

    def load(self) -> Iterator[Remembered]:
        """What earlier processes wrote, the newest within the budget, oldest first; what is no good is removed.

        One body is in memory at a time. Raises OSError when the folder cannot be read.
        """
        if not self._folder.is_dir():
            return
        found: list[tuple[int, int, Path]] = []
        for path in sorted(self._folder.iterdir()):
            head = _read_head(path) if path.suffix == _SUFFIX else None
            if head is not None and path == self._file(head.tenant, head.id):
                found.append((head.used_ms, head.size, path))
            elif path.suffix in (_SUFFIX, _HALF):
                path.unlink()
        left, chosen = self._limit, list[Path]()
        for _, size, path in sorted(found, reverse=True):
            left -= size
            if left >= 0:
                chosen.append(path)
            else:
                path.unlink()
        for path in reversed(chosen):
            if (one := _read(path)) is not None:
                yield one
            else:
                path.unlink()

    def _file(self, tenant: str, name: str) -> Path:
        """By id; two tenants may have been asked the same."""
        return self._folder / f"{name}-{xxh3_64_hexdigest(tenant.encode())}{_SUFFIX}"


def _read_head(path: Path) -> _Head | None:
    with path.open("rb") as file:
        try:
            return _head.decode(file.readline())
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


def _read(path: Path) -> Remembered | None:
    line, _, body = path.read_bytes().partition(b"\n")
    head = _head.decode(line)
    if len(body) != head.size or xxh3_64_hexdigest(body) != head.digest:
        return None
    return Remembered(head.tenant, head.id, Request(head.path, body), head.tokens, head.used_ms)
