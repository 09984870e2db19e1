"""The `nvml` probe: one NVIDIA GPU, or several used as one card, read through the driver's own library.

Invariant: whatever goes wrong (no library, driver gone, GPU lost, another GPU in its place) is an `Unread` with one
sentence, and the next look begins anew; nothing that could not be read counts as free. The library is opened once for
the process and kept open, since opening it wakes GPUs that nobody uses. It reads and changes nothing.

Sources: the NVML API reference. `used` of v1 holds what the driver keeps for itself, v2 tells that as `reserved`. Where
the GPU uses the machine's memory (Grace-Blackwell, Jetson) there is no memory to ask for: NotSupported, or a total of
0; then it is the machine's that counts, and the processes still come from NVML. Process ids are the machine's.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.backend import Owners, Reading, TenantState, Unread
from workers.vram.bounded import LIMIT_S, Bounded
from workers.vram.processes import PROC, held_by, words
from workers.vram.unified import host_memory

_MIB = 1 << 20
_TRIES = 3
"""A list of processes that grows while it is asked for is asked for again, so often."""

_NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _INSUFFICIENT_SIZE = 3, 4, 6, 7
_INVALID, _NO_FUNCTION, _OTHER_VERSION = 2, 13, 25
_NOBODY_TELLS = "the driver does not tell which processes use the GPU"
_MEND = {
    9: "the NVIDIA driver is not loaded; load it (modprobe nvidia), or restart the machine",
    12: "libnvidia-ml.so.1 is not here; install the NVIDIA driver, or start the container with its GPUs",
    15: "has fallen off the bus; look for Xid in dmesg, then reset it or restart the machine",
    16: "needs a reset; run nvidia-smi --gpu-reset, or restart the machine",
    18: "the NVIDIA driver was updated while in use, so its library and its module differ; restart the machine",
}
_OF_ALL = frozenset({9, 12, 18})
"""Errors that are the driver's, whichever GPU was asked."""


class _Failed(Exception):
    """Why this look ends, in one sentence; `anew`: the library is to be opened again. Never leaves this module."""

    def __init__(self, why: str, *, anew: bool = False) -> None:
        super().__init__(why)
        self.anew = anew


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU at one look. Bytes; `memory` (total, used, free, reserved) None: it has none of its own."""

    uuid: str
    memory: tuple[int, int, int, int] | None
    uses: Mapping[int, int | None]
    told: bool


class _Library:
    """The driver's library, which is one for the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False

    @contextmanager
    def opened(self) -> Generator[Any]:
        """Ready for calls, for one thread at a time. What it cannot do raises NVMLError."""
        with self._lock:
            lib: Any = importlib.import_module("pynvml")
            try:
                if not self._open:
                    lib.nvmlInit()
                    self._open = True
                yield lib
            except lib.NVMLError:
                self._drop(lib)
                raise
            except _Failed as failed:
                if failed.anew:
                    self._drop(lib)
                raise

    def close(self) -> None:
        """Let go of the driver; the next look opens it again."""
        with self._lock:
            if self._open:
                self._drop(importlib.import_module("pynvml"))

    def _drop(self, lib: Any) -> None:  # noqa: ANN401
        if self._open:
            self._open = False
            with suppress(lib.NVMLError):
                lib.nvmlShutdown()


LIBRARY = _Library()


class Nvml:
    """`gpus`: index or UUID of each GPU of the card; none: the machine's only one."""

    def __init__(self, gpus: Sequence[str] = (), proc: Path = PROC, limit_s: float = LIMIT_S) -> None:
        self._gpus = tuple(gpus)
        self._proc = proc
        self._bounded = Bounded[Reading | Unread]("the NVIDIA driver", limit_s)
        self._were: dict[str, str] = {}

    async def read(
        self, states: Mapping[str, TenantState], holder_pids: tuple[int, ...], owners: Owners
    ) -> Reading | Unread:
        """What the driver says now, whoever holds it; see the module text."""
        del states, holder_pids
        return await self._bounded.call(lambda: self._read(owners))

    def _read(self, owners: Owners) -> Reading | Unread:
        try:
            with LIBRARY.opened() as lib:
                gpus = [self._look(lib, gpu) for gpu in self._gpus or _only(lib)]
        except _Failed as failed:
            return Unread(str(failed))
        except Exception as error:
            if type(error).__module__ != "pynvml":
                raise
            return Unread(_sentence("the NVIDIA driver", error))
        if len({gpu.uuid for gpu in gpus}) < len(gpus):
            return Unread(f"{', '.join(self._gpus)} name the same GPU twice; name each once")
        return self._reading(gpus, owners)

    def _look(self, lib: Any, gpu: str) -> _Gpu:  # noqa: ANN401
        try:
            handle = _handle(lib, gpu)
            uuid = str(lib.nvmlDeviceGetUUID(handle))
            was = self._were.setdefault(gpu, uuid)
            if uuid != was:
                raise _Failed(f"GPU {gpu} is {uuid} now and was {was}; name it by its UUID, and restart swapper")
            uses, told = _uses(lib, handle)
            return _Gpu(uuid, _memory(lib, handle), uses, told)
        except lib.NVMLError as error:
            if error.value in _OF_ALL:
                raise
            raise _Failed(_sentence(f"GPU {gpu}", error), anew=True) from error

    def _reading(self, gpus: Sequence[_Gpu], owners: Owners) -> Reading | Unread:
        held = held_by(_in_mib(_together(gpu.uses for gpu in gpus)), owners, self._proc)
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus)}
        note = None if all(gpu.told for gpu in gpus) else f"{_NOBODY_TELLS}, so holders are missing here"
        own = [gpu.memory for gpu in gpus if gpu.memory is not None]
        if not own:
            host = host_memory(self._proc)
            if isinstance(host, Unread):
                return host
            sizes, pool = (host.total_mib, host.total_mib - host.free_mib, host.free_mib, 0), "host"
        elif len(own) == len(gpus):
            total, used, free, reserved = (sum(one) for one in zip(*own, strict=True))
            sizes, pool = (total // _MIB, -(-used // _MIB), free // _MIB, -(-reserved // _MIB)), "vram"
        else:
            return Unread(
                "some GPUs of this card have memory of their own and others the machine's; make them two cards"
            )
        total, used, free, reserved = sizes
        return Reading(total, used, free, words(held), reserved, held, pool, env, note)


def _only(lib: Any) -> tuple[str, ...]:  # noqa: ANN401
    count = int(lib.nvmlDeviceGetCount())
    if count == 1:
        return ("0",)
    if count == 0:
        raise _Failed("the NVIDIA driver is there and sees no GPU; look for Xid in dmesg")
    raise _Failed(f"there are {count} GPUs; say which one the card is, like index: 0 ({_there(lib)})")


def _handle(lib: Any, gpu: str) -> Any:  # noqa: ANN401
    """By index or UUID; _Failed names those there are."""
    try:
        return lib.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else lib.nvmlDeviceGetHandleByUUID(gpu)
    except lib.NVMLError as error:
        if error.value in (_INVALID, _NOT_FOUND):
            raise _Failed(f"there is no GPU {gpu} here; there is {_there(lib)}") from error
        raise


def _there(lib: Any) -> str:  # noqa: ANN401
    found: list[str] = []
    for index in range(int(lib.nvmlDeviceGetCount())):
        with suppress(lib.NVMLError):  # one that is lost cannot say its name
            handle = lib.nvmlDeviceGetHandleByIndex(index)
            found.append(f"{index}: {lib.nvmlDeviceGetName(handle)}, {lib.nvmlDeviceGetUUID(handle)}")
    return "; ".join(found) or "none that answers"


def _memory(lib: Any, handle: Any) -> tuple[int, int, int, int] | None:  # noqa: ANN401
    try:
        try:
            now = lib.nvmlDeviceGetMemoryInfo(handle, version=lib.nvmlMemory_v2)
            reserved = int(now.reserved)
        except lib.NVMLError as error:
            if error.value not in (_NOT_SUPPORTED, _NO_FUNCTION, _OTHER_VERSION):
                raise
            now, reserved = lib.nvmlDeviceGetMemoryInfo(handle), 0
    except lib.NVMLError as error:
        if error.value != _NOT_SUPPORTED:
            raise
        return None
    return (int(now.total), int(now.used), int(now.free), reserved) if now.total else None


def _uses(lib: Any, handle: Any) -> tuple[Mapping[int, int | None], bool]:  # noqa: ANN401
    """Bytes by pid, and whether the driver tells processes at all. One that computes and draws is in both lists."""
    found: dict[int, int | None] = {}
    told = False
    for kind in ("Compute", "Graphics"):
        try:
            processes = _listed(lib, f"nvmlDeviceGet{kind}RunningProcesses", handle)
        except lib.NVMLError as error:
            if error.value not in (_NOT_SUPPORTED, _NO_PERMISSION, _NO_FUNCTION):
                raise
            continue
        told = True
        for one in processes:
            known = [size for size in (found.get(one.pid), one.usedGpuMemory) if size is not None]
            found[int(one.pid)] = max(known, default=None)
    return found, told


def _listed(lib: Any, name: str, handle: Any) -> Sequence[Any]:  # noqa: ANN401
    ask: Callable[[Any], Sequence[Any]] = getattr(lib, name)
    for last in (False,) * (_TRIES - 1) + (True,):
        try:
            return ask(handle)
        except lib.NVMLError as error:
            if error.value == _NO_FUNCTION and ask is not (older := getattr(lib, f"{name}_v2")):
                ask = older
            elif error.value != _INSUFFICIENT_SIZE or last:
                raise
    return ()


def _together(uses: Iterable[Mapping[int, int | None]]) -> Mapping[int, int | None]:
    """What each process holds on all the GPUs; not known of one of them is not known."""
    found: dict[int, int | None] = {}
    for gpu in uses:
        for pid, size in gpu.items():
            before = found.get(pid, 0)
            found[pid] = None if size is None or before is None else before + size
    return found


def _in_mib(uses: Mapping[int, int | None]) -> Mapping[int, int | None]:
    return {pid: None if size is None else -(-size // _MIB) for pid, size in uses.items()}


def _sentence(whom: str, error: Any) -> str:  # noqa: ANN401
    said = _MEND.get(error.value)
    if said is None:
        return f"{whom} cannot be read, NVML says {error}; see what nvidia-smi says"
    return said if error.value in _OF_ALL else f"{whom} {said}"
