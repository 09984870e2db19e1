"""Prompts that were taken out of ComfyUI's queue because its lease was over: kept on disk until they are in it again.

Invariant: what was added is on the disk, readable by its owner alone, before `add` returns, so that whoever takes it
out of ComfyUI's queue afterwards loses nothing by dying. Touches one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

Json = dict[str, Any]


class Prompt(msgspec.Struct, frozen=True):
    """One prompt as it is posted again: `body` has its id and number. `deaths`: so often ComfyUI died over it."""

    id: str
    number: float
    body: Json
    deaths: int = 0

    @property
    def place(self) -> tuple[float, str]:
        """Where it stands in the queue."""
        return (self.number, self.id)


def again(sent: Mapping[str, object], prompt_id: str, number: float) -> Json:
    """What posts a prompt again that was first posted as `sent`: under the same id, in the same place."""
    return {**{key: value for key, value in sent.items() if key != "front"}, "prompt_id": prompt_id, "number": number}


class Taken:
    """See the module text. All of it is blocking; prompts are in the order of their places."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._prompts: dict[str, Prompt] = {}

    def load(self) -> str | None:
        """Take over what an earlier process took out; a sentence where that cannot be read (it is put aside)."""
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            self._prompts = {one.id: one for one in msgspec.json.decode(raw, type=list[Prompt])}
        except msgspec.DecodeError as error:
            aside = self._path.with_suffix(".unreadable")
            self._path.replace(aside)
            return (
                f"prompts that were taken out of ComfyUI's queue cannot be read ({error}); the file is kept as {aside}"
            )
        return None

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._prompts

    def prompts(self) -> list[Prompt]:
        """All of them, the next one first."""
        return sorted(self._prompts.values(), key=lambda one: one.place)

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Keep these as well."""
        self._prompts |= {one.id: one for one in prompts}
        self._write()

    def remove(self, ids: Iterable[str]) -> None:
        """These are in ComfyUI's queue, or over, or not wanted any more."""
        gone = [one for one in ids if self._prompts.pop(one, None) is not None]
        if gone:
            self._write()

    def _write(self) -> None:
        if not self._prompts:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._path.with_name(self._path.name + ".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self.prompts()))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(raw: bytes) -> Json | None:
    """A body as it came; None where it is no JSON object."""
    try:
        told = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None
    return cast("Json", told) if isinstance(told, dict) else None
