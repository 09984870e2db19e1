"""NVIDIA GPUs without any: a libnvidia-ml of our own (nvml.c, built with the machine's C compiler) and its state.

The shipped reader and the real nvidia-ml-py stay as they are. For a process that is started, `env` lets it find this
library in place of the driver's; `here()` lets our own. Change `gpus`, `driver`, `hang` or `boot`, then `tell()`: every
process sees it at its next call.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
MIB = 1 << 20
NOT_LOADED, NO_LIBRARY, LOST, NEEDS_RESET, MISMATCH = 9, 12, 15, 16, 18
V1_ONLY, TOLD_AS_NOTHING, NOT_SUPPORTED, NO_PERMISSION = 1, 2, 3, 4


@dataclass
class Process:
    """A process on a GPU. `mib` None: the driver does not tell; `kind` compute or graphics."""

    pid: int
    mib: int | None
    kind: str = "compute"


@dataclass
class Gpu:
    """`error`: of all its calls; `memory`: how it tells that (0: v2 and v1); `listing`: error of the process lists."""

    uuid: str
    total_mib: int = 24_576
    used_mib: int = 0
    reserved_mib: int = 0
    name: str = "NVIDIA Test"
    error: int = 0
    memory: int = 0
    listing: int = 0
    processes: list[Process] = field(default_factory=list[Process])


class FakeNvml:
    """The library and state in one folder; needs `cc`. `library`: one that was built before."""

    def __init__(self, folder: Path, *gpus: Gpu, library: Path | None = None) -> None:
        self.library = library or build(folder)
        self.state = folder / "nvml.state"
        self.gpus = list(gpus)
        self.driver = 0
        self.boot = 1
        self.hang = False
        self.env: Mapping[str, str] = {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STATE": str(self.state)}
        self.tell()

    def here(self) -> None:
        """Load it into this process, before the first look: whoever asks for libnvidia-ml.so.1 gets it by its name."""
        ctypes.CDLL(str(self.library))
        os.environ["NVML_STATE"] = str(self.state)

    def tell(self) -> None:
        """From now on this is what the driver says; never half of it."""
        lines = [f"driver {self.driver}", f"boot {self.boot}", *(["hang"] if self.hang else [])]
        for index, gpu in enumerate(self.gpus):
            sizes = f"{gpu.total_mib * MIB} {gpu.used_mib * MIB} {gpu.reserved_mib * MIB}"
            lines.append(f"gpu {index} {gpu.uuid} {sizes} {gpu.error} {gpu.memory} {gpu.listing} {gpu.name}")
            lines += [
                f"proc {index} {one.pid} {-1 if one.mib is None else one.mib * MIB} {one.kind}" for one in gpu.processes
            ]
        fresh = self.state.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.state)


def build(folder: Path) -> Path:
    """The library, in the folder."""
    library = folder / "libnvidia-ml.so.1"
    name = f"-Wl,-soname,{library.name}"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", name, "-o", library, SOURCE], check=True)
    return library
