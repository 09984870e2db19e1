"""What may be asked of the saved conversations of one server: the seam between the API and whoever has the slot folder.

Invariant: values and a Protocol only. A snapshot is what its manifest says; whether it could be restored now is the
folder owner's judgement, made again each time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from swapper.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Judged:
    """A snapshot and why it could not be restored now (None: nothing speaks against it).

    `compared`: its model runs, so that build and settings were compared, too; else only its file was looked at.
    """

    manifest: Manifest
    refused: str | None
    compared: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """A snapshot that was removed, and why."""

    manifest: Manifest
    why: str


class Shelf(Protocol):
    """The snapshots of one server. Everything raises BackendError where the folder cannot be used."""

    @property
    def folder(self) -> Path:
        """The slot folder as this host sees it."""
        ...

    async def manifests(self) -> Sequence[Manifest]:
        """All of the folder, the last used first."""
        ...

    async def judged(self, manifests: Sequence[Manifest]) -> Sequence[Judged]:
        """Each with its judgement, in the same order. Loads and wakes nothing."""
        ...

    async def remove(self, names: Collection[str]) -> None:
        """Delete these, with what belongs to them; one that is not there (any more) is fine."""
        ...

    async def prune(self) -> Sequence[Gone]:
        """Apply age and budget now, as every release does; what may be the only copy of a conversation stays."""
        ...


@runtime_checkable
class Shelved(Protocol):
    """A backend that saves conversations into a folder of this host."""

    def shelf(self) -> Shelf | None:
        """Its snapshots; None where nothing is saved."""
        ...
