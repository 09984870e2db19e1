"""`swapper stop`: ends the serve of a state folder and waits until it is gone."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import click

from swapper.cli.common import SEARCHED, Duration, print_json
from swapper.errors import SwapperError


@click.command(epilog="Example: swapper stop -c swapper.yaml")
@click.option(
    "-c", "--config", "path", type=click.Path(path_type=Path), help=f"The configuration serve runs with; {SEARCHED}."
)
@click.option("--timeout", type=Duration(), default="60s", help="Wait this long for it to end.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stop(path: Path | None, timeout: float, as_json: bool) -> None:
    """Stop serve. Residents and the servers it started stay as they are.

    Of the configuration it needs no more than `state_dir`: secrets need not be set for it.
    """
    from swapper.config.load import WHERE, load

    state_dir = load(path, os.environ, judge=False, only=WHERE).state_dir
    pid = end_serve(state_dir, timeout_s=timeout)
    if as_json:
        return print_json({"stopped": pid is not None, "pid": pid})
    said = f"no swapper serve runs with {state_dir}" if pid is None else f"stopped process {pid}; residents stay"
    return click.echo(said)


def end_serve(state_dir: Path, *, timeout_s: float) -> int | None:
    """Send TERM to the serve of this folder and wait for its end; its pid, or None when none runs.

    Raises SwapperError when it may not be signalled, or lives on after `timeout_s`.
    """
    from swapper.statefolder import serving_pid

    pid = serving_pid(state_dir)
    if pid is None:
        return None
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        if serving_pid(state_dir) != pid:  # the number may have changed hands before the descriptor was open
            return None
        signal.pidfd_send_signal(process, signal.SIGTERM)
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        if not waiting.poll(timeout_s * 1000):
            raise SwapperError(f"process {pid} still runs after {timeout_s:g} s; look into its log, then try again")
    except ProcessLookupError:
        return pid
    except PermissionError:
        raise SwapperError(f"process {pid} belongs to somebody else; stop it as that user") from None
    finally:
        os.close(process)
    return pid
