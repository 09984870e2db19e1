"""AMD GPUs of a test: the files the amdgpu driver has in sysfs, and a /proc beside them, under one root."""

from __future__ import annotations

from pathlib import Path

from tests.support.proc import Proc

MIB = 1 << 20
DISCRETE = b"\x00\x00\x01\x03"
"""The head of gpu_metrics of a GPU with memory of its own."""


class Amd:
    """`root` has `sys` and `proc`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = Proc(root / "proc")
        self._drm = root / "sys/class/drm"
        self._drm.mkdir(parents=True)

    def gpu(
        self,
        pci: str,
        *,
        vram: tuple[int, int],
        gtt: tuple[int, int],
        card: int = 0,
        metrics: bytes | None = DISCRETE,
        vendor: str = "0x1002",
        unique: str | None = None,
        node: int | None = None,
    ) -> None:
        """A GPU; `vram` and `gtt` are (total, used) in MiB, `node` is its place in the compute topology."""
        device = self._drm / f"card{card}" / "device"
        device.mkdir(parents=True)
        (self._drm / f"card{card}-DP-1").mkdir()
        for pool, (total, used) in (("vram", vram), ("gtt", gtt)):
            (device / f"mem_info_{pool}_total").write_text(f"{total * MIB}\n")
            (device / f"mem_info_{pool}_used").write_text(f"{used * MIB}\n")
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "uevent").write_text(f"DRIVER=amdgpu\nPCI_CLASS=30000\nPCI_SLOT_NAME={pci}\n")
        if metrics is not None:
            (device / "gpu_metrics").write_bytes(metrics)
        if unique is not None:
            (device / "unique_id").write_text(f"{unique}\n")
        if node is not None:
            self._node(node, pci)

    def lose(self, card: str) -> None:
        """It is gone from the bus."""
        for path in sorted((self._drm / card).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (self._drm / card).rmdir()

    def garble(self, card: str, file: str) -> None:
        """The driver tells nothing in that file any more."""
        (self._drm / card / "device" / file).write_text("")

    def _node(self, node: int, pci: str) -> None:
        domain, bus, rest = pci.split(":")
        slot, function = rest.split(".")
        place = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
        nodes = self.root / "sys/class/kfd/kfd/topology/nodes"
        for number, simds in ((0, 0), (node, 256)):
            (nodes / str(number)).mkdir(parents=True, exist_ok=True)
            facts = f"simd_count {simds}\nlocation_id {place if simds else 0}\ndomain {int(domain, 16)}\n"
            (nodes / str(number) / "properties").write_text(facts)
