"""A folder to try swapper in by hand: a tiny model, its preset, and a configuration that is ready to serve.

    python -m swapper.demo.tiny FOLDER

Invariant: writes into that folder only, starts nothing, and overwrites no configuration. It says how llama-server is
started on this machine, for those who want to start it themselves.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from swapper.demo.server import find_llama_server
from swapper.demo.stage import furnish, router_command
from swapper.errors import SwapperError

PORT, LISTEN = 8080, 9292


def main(arguments: list[str]) -> int:
    """Furnish the folder; see the module text."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m swapper.demo.tiny FOLDER", file=sys.stderr)
        return 2
    try:
        print(lay_out(Path(arguments[0]).absolute()))
    except SwapperError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def lay_out(folder: Path) -> str:
    """Make it; returns what to do next. Raises SwapperError where there is a configuration, or no llama-server."""
    path = folder / "swapper.yaml"
    if path.exists():
        raise SwapperError(f"{path} is there already; choose another folder, or remove it")
    llama = find_llama_server()
    folder.mkdir(parents=True, exist_ok=True)
    furnish(folder, llama, PORT, lambda _: None, listen=LISTEN)
    return (
        f"{folder} is ready: swapper serve -c {shlex.quote(str(path))}\n"
        "It starts llama-server itself. To start that yourself, write control: attach there, without command, and run\n"
        f"  {shlex.join(router_command(folder, llama, PORT))}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
