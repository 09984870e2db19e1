"""A wall clock that a test steps under running processes: a preloaded library, built with the machine's C compiler."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("clockstep.c")


class Clock:
    """`env` makes a process, and what it starts, look at this clock instead of the machine's."""

    def __init__(self, folder: Path) -> None:
        """Builds the library into the folder; needs `cc`."""
        self._file = folder / "step"
        library = folder / "clockstep.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
        self.step(0)
        self.env: Mapping[str, str] = {"LD_PRELOAD": str(library), "CLOCK_STEP": str(self._file)}

    def step(self, seconds: int) -> None:
        """From now on it is so many seconds ahead of the machine's clock (behind it, if negative)."""
        with open(self._file, "r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", seconds * 1_000_000_000))
