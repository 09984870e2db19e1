"""What runs of a job on this machine, found by the lease in its environment, whatever swapper believes."""

from __future__ import annotations

import psutil

from tests.support.server import Json


def processes(job: Json) -> list[psutil.Process]:
    """What runs of it; not the launcher, which writes down how it ended a moment later."""
    return [p for p in psutil.process_iter() if _environ(p).get("SWAPPER_LEASE") == job["lease"] and not _launches(p)]


def _launches(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("control/launcher.py") for word in process.cmdline())
    except psutil.Error:
        return True


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}
