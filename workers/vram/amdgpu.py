"""The `amdgpu` probe: one AMD GPU, or several used as one card, read from sysfs under a root.

Invariant: of a GPU one pool counts and never two: its VRAM, or, on a GPU without memory of its own whose VRAM is only a
part of the machine's that the firmware set aside, the larger of that and GTT (the kernel places there by the same
rule). What cannot be read is an `Unread` with one sentence. It reads and changes nothing.

Sources: the kernel's amdgpu documentation (mem_info_vram_total and the like, bytes; gpu_metrics, whose format revision
is 1 for a GPU with memory of its own, 2 or 3 for one without) and drm-usage-stats (fdinfo; a client that is open
several times, or was inherited, has one drm-client-id and counts once).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.backend import Owners, Reading, TenantState, Unread
from workers.vram.bounded import LIMIT_S, Bounded
from workers.vram.processes import held_by, words
from workers.vram.unified import host_memory

_MIB = 1 << 20
_VENDOR = "0x1002"
_SMALL = 1 << 30
"""No GPU of its own memory has so little; used where gpu_metrics is missing."""
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class _Failed(Exception):
    """Why this look ends, in one sentence; never leaves this module."""


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One GPU. `pool` is vram or gtt, `kfd` its place among the compute devices (None: it has none)."""

    pci: str
    folder: Path
    pool: str
    kfd: int | None


class Amdgpu:
    """`gpus` names each GPU of the card; none: the machine's only one. `root` has `sys` and `proc`.

    A name is its place among the AMD GPUs in the order of their PCI addresses, its PCI address, or its unique id.
    """

    def __init__(self, gpus: Sequence[str] = (), root: Path = Path("/"), limit_s: float = LIMIT_S) -> None:
        self._gpus = tuple(gpus)
        self._root = root
        self._bounded = Bounded[Reading | Unread]("the amdgpu driver", limit_s)
        self._were: dict[str, str] = {}

    async def read(
        self, states: Mapping[str, TenantState], holder_pids: tuple[int, ...], owners: Owners
    ) -> Reading | Unread:
        """What the driver says now, whoever holds it; see the module text."""
        del states, holder_pids
        return await self._bounded.call(lambda: self._read(owners))

    def _read(self, owners: Owners) -> Reading | Unread:
        try:
            gpus = self._named()
            pool = gpus[0].pool
            if any(gpu.pool != pool for gpu in gpus):
                return Unread(
                    "some GPUs of this card have memory of their own and others the machine's; make them two cards"
                )
            total = sum(_size(gpu, "total") for gpu in gpus)
            used = sum(_size(gpu, "used") for gpu in gpus)
        except _Failed as failed:
            return Unread(str(failed))
        free = max(0, total - used) // _MIB
        if pool == "gtt":
            host = host_memory(self._root / "proc")
            if isinstance(host, Unread):
                return host
            free = min(free, host.free_mib)
        return self._reading(gpus, (total // _MIB, -(-used // _MIB), free), owners)

    def _reading(self, gpus: Sequence[_Gpu], sizes: tuple[int, int, int], owners: Owners) -> Reading:
        proc = self._root / "proc"
        uses, hidden = _uses(proc, {gpu.pci for gpu in gpus}, gpus[0].pool)
        held = held_by({pid: -(-size // _MIB) for pid, size in uses.items()}, owners, proc)
        places = [str(gpu.kfd) for gpu in gpus if gpu.kfd is not None]
        env = {"HIP_VISIBLE_DEVICES": ",".join(places)} if len(places) == len(gpus) else {}
        note = f"{hidden} processes of other users cannot be looked into, so holders may be missing here"
        return Reading(*sizes, words(held), 0, held, gpus[0].pool, env, note if hidden else None)

    def _named(self) -> Sequence[_Gpu]:
        there = self._there()
        if not there:
            raise _Failed("there is no GPU of the amdgpu driver here; is it loaded, and is /sys visible?")
        if not self._gpus and len(there) > 1:
            raise _Failed(f"there are {len(there)} AMD GPUs; say which one the card is, like index: 0 ({_list(there)})")
        found = [self._same(gpu, _find(there, gpu)) for gpu in self._gpus or ("0",)]
        if len({gpu.pci for gpu in found}) < len(found):
            raise _Failed(f"{', '.join(self._gpus)} name the same GPU twice; name each once")
        return found

    def _same(self, name: str, found: _Gpu) -> _Gpu:
        """Places move up when a GPU is lost."""
        was = self._were.setdefault(name, found.pci)
        if found.pci != was:
            raise _Failed(f"AMD GPU {name} is {found.pci} now and was {was}; look for amdgpu in dmesg, restart swapper")
        return found

    def _there(self) -> Sequence[_Gpu]:
        folders: dict[str, Path] = {}
        for card in (self._root / "sys/class/drm").glob("card*"):
            device = card / "device"
            if card.name[4:].isdecimal() and _text(device / "vendor") == _VENDOR and (device / _file("vram")).exists():
                folders[_pci(device)] = device
        places = self._compute_places()
        return [_Gpu(pci, folder, _pool(folder), places.get(pci)) for pci, folder in sorted(folders.items())]

    def _compute_places(self) -> Mapping[str, int]:
        """PCI address -> place among the compute devices, which is how HIP numbers them."""
        found: dict[int, str] = {}
        for node in (self._root / "sys/class/kfd/kfd/topology/nodes").glob("*"):
            facts = dict(re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.MULTILINE))
            if node.name.isdecimal() and int(facts.get("simd_count", 0)):
                where, domain = int(facts.get("location_id", 0)), int(facts.get("domain", 0))
                pci = f"{domain:04x}:{where >> 8 & 0xFF:02x}:{where >> 3 & 0x1F:02x}.{where & 7}"
                found[int(node.name)] = pci
        return {found[node]: place for place, node in enumerate(sorted(found))}


def _find(there: Sequence[_Gpu], name: str) -> _Gpu:
    if name.isdecimal() and int(name) < len(there):
        return there[int(name)]
    wanted = name.lower().removeprefix("0x").removeprefix("gpu-")
    for gpu in there:
        if wanted in (gpu.pci, gpu.pci.removeprefix("0000:"), _text(gpu.folder / "unique_id")):
            return gpu
    raise _Failed(f"there is no AMD GPU {name} here; there is {_list(there)}")


def _list(there: Sequence[_Gpu]) -> str:
    return "; ".join(f"{place}: {gpu.pci}" for place, gpu in enumerate(there))


def _pool(device: Path) -> str:
    """Which memory of a GPU counts."""
    vram, gtt = _number(device / _file("vram")), _number(device / _file("gtt"))
    if vram is None or gtt is None:
        return "vram"
    try:
        revision = (device / "gpu_metrics").read_bytes()[2]
    except (OSError, IndexError):
        revision = 2 if vram < _SMALL else 1
    return "gtt" if revision > 1 and gtt > vram else "vram"


def _file(pool: str, what: str = "total") -> str:
    return f"mem_info_{pool}_{what}"


def _size(gpu: _Gpu, what: str) -> int:
    """Bytes."""
    path = gpu.folder / _file(gpu.pool, what)
    size = _number(path)
    if size is None or (what == "total" and size == 0):
        raise _Failed(f"AMD GPU {gpu.pci} does not tell its memory ({path.name}); look for amdgpu in dmesg")
    return size


def _uses(proc: Path, cards: set[str], pool: str) -> tuple[Mapping[int, int], int]:
    """Bytes by pid on these GPUs, and of how many processes the files may not be looked at."""
    uses: dict[int, int] = {}
    clients: set[tuple[str, str]] = set()
    hidden = 0
    for pid in sorted(int(entry.name) for entry in proc.glob("*") if entry.name.isdecimal()):
        try:
            opened = list(_opened(proc / str(pid)))
        except PermissionError:
            hidden += 1
            continue
        except OSError:
            continue  # it ended meanwhile
        for facts in opened:
            card, client = facts.get("drm-pdev", ""), facts.get("drm-client-id", "")
            size = facts.get(f"drm-memory-{pool}") or facts.get(f"drm-resident-{pool}")
            if card in cards and size is not None and (card, client) not in clients:
                clients.add((card, client))
                uses[pid] = uses.get(pid, 0) + _bytes(size)
    return {pid: size for pid, size in uses.items() if size}, hidden


def _opened(process: Path) -> Iterator[Mapping[str, str]]:
    """The facts of each open file that is a GPU."""
    for fd in (process / "fd").iterdir():
        try:
            if not str(fd.readlink()).startswith("/dev/dri/"):
                continue
            text = (process / "fdinfo" / fd.name).read_text()
        except FileNotFoundError:
            continue  # closed meanwhile
        yield {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def _bytes(text: str) -> int:
    number, _, unit = text.partition(" ")
    return int(number) * _UNITS.get(unit, 1) if number.isdecimal() else 0


def _pci(device: Path) -> str:
    found = re.search(r"^PCI_SLOT_NAME=(\S+)$", _text(device / "uevent"), re.MULTILINE)
    return found[1].lower() if found else device.resolve().name


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
