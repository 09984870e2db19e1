"""Remembers on disk whether a ComfyUI has loaded anything since it was last asked to free it: nobody else tells.

Invariant: it tells of the process it was noted for, and nothing of any other (run "": one that nobody here knows, in
which case a word is good until the next). Touches one file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from swapper.errors import BackendDown


class Marker:
    """See the module text. A file that cannot be read remembers nothing.

    What is to be remembered or forgotten is so from then on in this process, also where BackendDown says that the file
    is not; the next word tries again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run, self._loaded = self._written = _read(path)

    def loaded(self, run: str) -> bool | None:
        """Whether that process has what it loaded; None: it is another one, or nothing is known."""
        return self._loaded if self._run == run else None

    @property
    def last(self) -> bool:
        """Whether the last one that was noted had."""
        return self._run is not None and self._loaded

    def note(self, run: str, *, loaded: bool) -> None:
        """Remember it. Blocking. Raises BackendDown where it cannot be written."""
        self._run, self._loaded = run, loaded
        if self._written == (run, loaded):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_text(json.dumps({"run": run, "loaded": loaded}))
            fresh.replace(self._path)
        except OSError as error:
            raise BackendDown(f"{self._path} cannot be written: {error.strerror}") from error
        self._written = run, loaded

    def forget(self) -> None:
        """Its process is gone. Raises BackendDown where the file cannot be removed."""
        self._run, self._loaded = self._written = None, False
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise BackendDown(f"{self._path} cannot be removed: {error.strerror}") from error


def _read(path: Path) -> tuple[str | None, bool]:
    try:
        kept: object = json.loads(path.read_text())
    except (OSError, ValueError):
        return None, False
    told = cast("dict[str, object]", kept) if isinstance(kept, dict) else {}
    run = told.get("run")
    return (run, told.get("loaded") is True) if isinstance(run, str) else (None, False)
