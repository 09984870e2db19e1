"""Who a GGUF is without reading 20 GB: the header and the tensor table, its size and its time of change.

Invariant: the identity of a file is computed once for each (device, inode, size, mtime) and kept in the state
folder; tensor data are never read. Touches the model file (reading) and its cache file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import struct
from pathlib import Path

import msgspec

from swapper.snapshots.manifest import GgufIdentity

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # gguf's scalar types, bytes
_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<nth>\d{5})-of-(?P<count>\d{5})\.gguf$")


class GgufIdentities:
    """The cache, one JSON file. Not shared between processes at the same time (last writer wins, nothing breaks)."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "gguf.json"
        self._known = self._read()

    def identity(self, path: str) -> GgufIdentity:
        """Identity of a model as `path` names it, all its shards together. Blocking; unknown where unreadable."""
        try:
            parts = [self._part(Path(shard)) for shard in shards(path)]
        except (OSError, ValueError):
            return GgufIdentity(path=path)
        digest = parts[0][0] if len(parts) == 1 else hashlib.sha256("".join(p[0] for p in parts).encode()).hexdigest()
        size, changed = sum(p[1] for p in parts), max(p[2] for p in parts)
        return GgufIdentity(path=path, digest=digest, size=size, mtime_ns=changed)

    def _part(self, path: Path) -> tuple[str, int, int]:
        stat = path.stat()
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in self._known:
            self._known[key] = header_digest(path)
            self._write()
        return self._known[key], stat.st_size, stat.st_mtime_ns

    def _read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            return {}

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # only a cache
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".tmp")
            fresh.write_bytes(msgspec.json.encode(self._known))
            os.replace(fresh, self._path)


def shards(path: str) -> list[str]:
    """The files of a model: `x-00001-of-00003.gguf` names all three, any other name itself."""
    folder, _, name = path.rpartition("/")
    found = _SPLIT.match(name)
    if found is None:
        return [path]
    count = int(found["count"])
    prefix = f"{folder}/" if folder or path.startswith("/") else ""
    return [f"{prefix}{found['stem']}-{nth:05d}-of-{count:05d}.gguf" for nth in range(1, count + 1)]


def header_digest(path: Path) -> str:
    """sha256 (hex) of header, metadata and tensor table; raises ValueError when it is not a GGUF. Blocking."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        try:
            end = _Walk(data).end()
        except (struct.error, KeyError, IndexError) as error:
            raise ValueError(f"the header of {path} is damaged") from error
        if end > len(data):
            raise ValueError(f"the header of {path} is cut short")
        return hashlib.sha256(data[:end]).hexdigest()


class _Walk:
    """Walks over a GGUF header without keeping anything."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4

    def end(self) -> int:
        """Offset of the first byte after the tensor table."""
        self._number("<I")  # format version
        tensors, pairs = self._number("<Q"), self._number("<Q")
        for _ in range(pairs):
            self._string()
            self._value(self._number("<I"))
        for _ in range(tensors):
            self._string()
            dimensions = self._number("<I")
            self._at += dimensions * 8 + 4 + 8  # shape, type, offset
        return self._at

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _string(self) -> None:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        self._at += 8 + length

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _WIDTH:
                self._at += _WIDTH[inner] * count
            else:
                for _ in range(count):
                    self._value(inner)
        else:
            self._at += _WIDTH[kind]
