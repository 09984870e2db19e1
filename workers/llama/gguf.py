"""Who a GGUF is without reading 20 GB: the header and the tensor table, its size and its time of change.

Invariant: a file's header is read once for each (device, inode, size, mtime), and what was found is kept in the state
folder; tensor data are never read. Touches the model file (reading) and its cache file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swapper.snapshots.manifest import GgufIdentity
from workers.llama.strategy import Scalar

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_FORM: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)  # gguf's scalar types
_WIDTH = {kind: struct.calcsize("<" + form) for kind, form in _FORM.items()}
_ARCHITECTURE = "general.architecture"
_LONGEST = 128
"""Bytes of a string that is worth keeping: names are, templates and licences are not."""
_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<nth>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Header:
    """`digest`: sha256 (hex) of header, metadata and tensor table. `facts`: the scalars of the model's architecture."""

    digest: str
    facts: Mapping[str, Scalar]


class GgufIdentities:
    """The cache, one JSON file. Not shared between processes at the same time (last writer wins, nothing breaks).

    `keep` false: what is found is not kept, and nothing is written.
    """

    def __init__(self, state_dir: Path, *, keep: bool = True) -> None:
        self._path = state_dir / "gguf.json"
        self._keep = keep
        self._known = self._read()

    def identity(self, path: str) -> GgufIdentity:
        """Identity of a model as `path` names it, all its shards together. Blocking; unknown where unreadable."""
        try:
            parts = [self._part(Path(shard)) for shard in shards(path)]
        except (OSError, ValueError):
            return GgufIdentity(path=path)
        digests = [part[0].digest for part in parts]
        digest = digests[0] if len(parts) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        size, changed = sum(p[1] for p in parts), max(p[2] for p in parts)
        return GgufIdentity(path=path, digest=digest, size=size, mtime_ns=changed)

    def facts(self, path: str) -> Mapping[str, Scalar] | None:
        """What the header says of the model's architecture; None where it cannot be read here. Blocking."""
        try:
            return self._part(Path(shards(path)[0]))[0].facts
        except (OSError, ValueError):
            return None

    def _part(self, path: Path) -> tuple[Header, int, int]:
        stat = path.stat()
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in self._known:
            self._known[key] = read_header(path)
            if self._keep:
                self._write()
        return self._known[key], stat.st_size, stat.st_mtime_ns

    def _read(self) -> dict[str, Header]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Header])
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


def read_header(path: Path) -> Header:
    """Read header, metadata and tensor table; raises ValueError when it is not a GGUF. Blocking."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        walk = _Walk(data)
        try:
            end = walk.end()
        except (struct.error, KeyError, IndexError) as error:
            raise ValueError(f"the header of {path} is damaged") from error
        if end > len(data):
            raise ValueError(f"the header of {path} is cut short")
        return Header(hashlib.sha256(data[:end]).hexdigest(), walk.facts())


class _Walk:
    """Walks over a GGUF header; keeps its scalars and short strings."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4
        self._scalars: dict[str, Scalar] = {}

    def facts(self) -> dict[str, Scalar]:
        """The name of the architecture and the scalars that belong to it."""
        own = f"{self._scalars.get(_ARCHITECTURE, '')}."
        return {key: value for key, value in self._scalars.items() if key == _ARCHITECTURE or key.startswith(own)}

    def end(self) -> int:
        """Offset of the first byte after the tensor table."""
        self._number("<I")  # format version
        tensors, pairs = self._number("<Q"), self._number("<Q")
        for _ in range(pairs):
            key = self._string()
            value = self._value(self._number("<I"))
            if value is not None:
                self._scalars[key] = value
        for _ in range(tensors):
            self._string()
            dimensions = self._number("<I")
            self._at += dimensions * 8 + 4 + 8  # shape, type, offset
        return self._at

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _string(self) -> str:
        """Its beginning, up to _LONGEST bytes."""
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        self._at = start + length
        return self._data[start : start + min(length, _LONGEST)].decode(errors="replace")

    def _value(self, kind: int) -> Scalar | None:
        """A scalar's value; None for an array, which is stepped over."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _WIDTH:
                self._at += _WIDTH[inner] * count
            else:
                for _ in range(count):
                    self._value(inner)
            return None
        (value,) = struct.unpack_from("<" + _FORM[kind], self._data, self._at)
        self._at += _WIDTH[kind]
        return value  # pyright: ignore[reportAny]
