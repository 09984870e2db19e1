"""The environment of a job: little of swapper's own, which may hold keys, and what its recipe names.

Invariant: what is in no list here reaches a job only by its recipe's `env:`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

_PASSED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "LIBVA_DRIVER_NAME", "LIBVA_DRIVERS_PATH", "VDPAU_DRIVER", "VK_ICD_FILENAMES"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "GPU_DEVICE_ORDINAL", "ONEAPI_DEVICE_SELECTOR"),
    )
)
_PASSED_BY_BEGIN = ("LC_", "CUDA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ZE_")
OURS = frozenset({"SWAPPER_LEASE", "SWAPPER_TOKEN", "SWAPPER_URL"})
"""What every job gets of us."""
_READ = re.compile(r"\$\{?([A-Z_][A-Z0-9_]+)")
_GIVEN = re.compile(r"\b([A-Z_][A-Z0-9_]+)=|\b(?:for|read(?: -\w+)*)\s+([A-Z_][A-Z0-9_]+)")


def passed_on(environ: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """What a job gets of `environ`, and what its recipe names: `NAME` as it is there, or `NAME=value`."""
    found = {name: value for name, value in environ.items() if _is_passed(name)}
    for one in named:
        name, equals, value = one.partition("=")
        if equals:
            found[name] = value
        elif name in environ:
            found[name] = environ[name]
    return found


def doubts(command: Sequence[str], named: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """What a command may lack of `environ`, a sentence each: what it reads and does not get, what is not there."""
    names = {one.partition("=")[0] for one in named}
    script = " ".join(command)
    given = {one for pair in _GIVEN.findall(script) for one in pair} | names | OURS
    for name in sorted({*_READ.findall(script)} - given):
        if not _is_passed(name):
            yield f"its command reads ${name}, which a job does not get; name it in env: [{name}]"
    for name in sorted(one for one in named if "=" not in one and one not in environ):
        yield f"env names {name}, which is not set here; where serve has it neither the command runs without it"


def _is_passed(name: str) -> bool:
    return name in _PASSED or name.startswith(_PASSED_BY_BEGIN)
