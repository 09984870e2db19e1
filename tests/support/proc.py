"""A /proc of a test: processes with their parents, cgroups and open GPU files, and the machine's memory."""

from __future__ import annotations

from pathlib import Path


class Proc:
    """A tree of files at `root`, shaped as proc(5) says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def add(self, pid: int, name: str, *, parent: int = 1, started: int = 1_000, cgroup: str = "0::/") -> None:
        """A process. Its name in `stat` is in parentheses and may hold any character."""
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fdinfo").mkdir()
        rest = " ".join(["0"] * 30)
        after = f"S {parent} {pid} {pid} 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 {started} {rest}"
        (folder / "stat").write_text(f"{pid} ({name}) {after}\n")
        (folder / "comm").write_text(f"{name}\n")
        (folder / "cgroup").write_text(f"{cgroup}\n")

    def open(self, pid: int, fd: int, target: str, **facts: str) -> None:
        """An open file of the process; `facts` are lines of its fdinfo, with - for each _."""
        folder = self.root / str(pid)
        (folder / "fd" / str(fd)).symlink_to(target)
        lines = [f"{key.replace('_', '-')}:\t{value}" for key, value in facts.items()]
        (folder / "fdinfo" / str(fd)).write_text("\n".join(["pos:\t0", "flags:\t02100002", *lines]) + "\n")

    def end(self, pid: int) -> None:
        """It is gone."""
        folder = self.root / str(pid)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()
        folder.rmdir()

    def meminfo(self, *, total_mib: int, available_mib: int) -> None:
        """The machine's memory; MemFree is less than what is available, as ever."""
        (self.root / "meminfo").write_text(
            f"MemTotal:       {total_mib * 1024} kB\n"
            f"MemFree:        {available_mib * 256} kB\n"
            f"MemAvailable:   {available_mib * 1024} kB\n"
            "HugePages_Total:       0\n"
        )
