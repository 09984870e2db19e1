"""Where the llama-server of the demo is, how it must be started here, and whether it runs on this machine.

Invariant: a server is returned only after it answered `--version`; otherwise the reason is one sentence.

The wheel's CPU part is compiled for one family of processors (AVX-512 and AMX): elsewhere it dies of an illegal
instruction, at the first model load and without a word. The package `libggml-python` has the same library for any
processor with AVX2; preloaded, it takes that part's place, in the router and in the models it starts.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from swapper.errors import SwapperError

PROGRAM = "llama-server-vulkan"
_GLIBC = "2.35"
_VERSION_SECONDS = 20
_PORTABLE_NEEDS = frozenset({"avx2", "fma", "f16c", "bmi2"})
_WHEEL_NEEDS = _PORTABLE_NEEDS | {
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512vbmi",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
}


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """A llama-server that runs here: how to start it, and the version it states.

    `portable`: its CPU part is the one for any processor with AVX2, which reads a prompt two to three times slower.
    """

    command: tuple[str, ...]
    version: str
    portable: bool


def find_llama_server() -> LlamaServer:
    """Find the wheel's llama-server beside this Python, else on PATH, and start it once with `--version`.

    Raises SwapperError with one sentence where there is none or it does not run.
    """
    beside = Path(sys.executable).with_name(PROGRAM)
    found = str(beside) if beside.is_file() else shutil.which(PROGRAM)
    if found is None:
        raise SwapperError(_missing())
    preload = _preload(_processor_flags())
    command = (*preload, found)
    try:
        answer = subprocess.run(
            [*command, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SwapperError(f"The demo's llama-server at {found} does not start on this machine: {error}.") from error
    said = (answer.stdout + answer.stderr).strip().splitlines()
    if answer.returncode != 0:
        raise SwapperError(_does_not_run(found, said))
    version = next((line for line in said if line.startswith("version:")), "version: unknown")
    return LlamaServer(command, version.removeprefix("version:").strip(), bool(preload))


def _preload(flags: frozenset[str]) -> tuple[str, ...]:
    """What goes in front of the program so that its CPU part suits this processor: nothing where it does anyway."""
    if flags >= _WHEEL_NEEDS:
        return ()
    if missing := _PORTABLE_NEEDS - flags:
        lacks = ", ".join(sorted(missing)).upper()
        raise SwapperError(f"The demo's llama-server needs a processor with AVX2; this one lacks {lacks}.")
    package = importlib.util.find_spec("libggml")
    library = Path(package.origin or "").with_name("lib64") / "libggml-cpu.so.0" if package else None
    if library is None or not library.is_file():
        raise SwapperError(
            "The demo's llama-server is built for AVX-512, which this processor lacks, and the portable library "
            "is not installed: pip install -e '.[demo]' in a checkout."
        )
    others = os.environ.get("LD_PRELOAD")
    return "env", f"LD_PRELOAD={library}" + (f":{others}" if others else "")


def _processor_flags() -> frozenset[str]:
    """The instruction sets all of this machine's processors have, in the kernel's spelling."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return frozenset()
    per_processor = [line.partition(":")[2].split() for line in lines if line.startswith("flags")]
    common = set(per_processor[0]) if per_processor else set[str]()
    for flags in per_processor:
        common &= set(flags)
    return frozenset(common)


def _missing() -> str:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        return (
            "The demo needs Linux on x86-64, because the llama-server it brings along is built for nothing else; "
            f"this is {system} on {machine}."
        )
    return "The demo needs its own llama-server, which is not installed: pip install -e '.[demo]' in a checkout."


def _does_not_run(program: str, said: list[str]) -> str:
    last = said[-1] if said else "it said nothing"
    library, version = platform.libc_ver()
    if library == "glibc" and _as_numbers(version) < _as_numbers(_GLIBC):
        return f"The demo's llama-server needs glibc {_GLIBC} or newer, and this machine has {version} ({last})."
    return f"The demo's llama-server at {program} does not run on this machine: {last}."


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
