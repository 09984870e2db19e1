"""The command `swapper`: a table of names, each loaded from its module only when it is used.

Invariant: `swapper --help` imports nothing but click; a SwapperError leaves as one sentence on standard error with an
exit status (2 configuration or usage, 69 not reachable, 1 everything else), never as a traceback.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from swapper import __version__
from swapper.errors import ApiDown, ApiRefused, ConfigError, StoreDown, SwapperError

FAILED = 1
USAGE = 2
UNAVAILABLE = 69
REVOKED = 70
OUT_OF_TIME = 75

COMMANDS = {
    "demo": ("swapper.cli.demo", "Show a card changing hands on a real llama-server, without GPU or configuration."),
    "serve": ("swapper.cli.serve", "Coordinator, API, gateway and this host's agent."),
    "stop": ("swapper.cli.stop", "Stop serve; residents stay as they are."),
    "check": ("swapper.cli.check", "Say what would fail with this configuration, and how to mend it."),
    "run": ("swapper.cli.run", "Run a command under a lease of a card."),
    "job": ("swapper.cli.job", "Run recipes of the configuration under a lease."),
    "lease": ("swapper.cli.lease", "Request, look at, keep and give back leases."),
    "explain": ("swapper.cli.explain", "Why a lease waits, or what a swap does, in one sentence."),
    "status": ("swapper.cli.status", "What is on which card, and who waits."),
    "load": ("swapper.cli.byhand", "Load a model by hand."),
    "unload": ("swapper.cli.byhand", "Unload a model; it comes back when it is asked for."),
    "vacate": ("swapper.cli.byhand", "Unload all that is on a card."),
    "pin": ("swapper.cli.byhand", "Keep a tenant on its card."),
    "unpin": ("swapper.cli.byhand", "Let a pinned tenant go again."),
    "swaps": ("swapper.cli.swaps", "Swaps, and each step of one."),
    "snapshots": ("swapper.cli.snapshots", "Saved conversations: list, delete, and prove that they come back."),
    "events": ("swapper.cli.events", "The event log."),
}


class LazyGroup(click.Group):
    """A group whose commands are looked up in COMMANDS and imported when invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command; it holds a click command of the same name."""
        if cmd_name not in COMMANDS:
            return None
        found: object = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without importing what it names."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        """Run the command; errors of ours become a sentence and an exit status."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            for problem in error.problems:
                click.echo(problem, err=True)
            ctx.exit(USAGE)
        except SwapperError as error:
            click.echo(f"Error: {_sentence(error)}", err=True)
            ctx.exit(UNAVAILABLE if isinstance(error, ApiDown | StoreDown) else FAILED)
        except KeyboardInterrupt:
            ctx.exit(130)


def _sentence(error: SwapperError) -> str:
    """Its text; of a key that is missing or has too few rights, with how another is given here."""
    if not isinstance(error, ApiRefused) or error.status not in (401, 403):
        return str(error)
    if error.status == 403:
        return f"{str(error).rstrip('.')}; give another key with --key or SWAPPER_KEY"
    what = str(error).rstrip(".").partition(":")[0]
    return f"{what}; give one of the server's with --key or SWAPPER_KEY"


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0 done, 1 failed or refused, 2 wrong usage or configuration, 69 swapper not reachable, "
    "70 lease lost under the command, 75 wait ran out. "
    "Example: swapper run --card gpu0 --label encode -- ffmpeg -i in.mkv out.mkv",
)
@click.version_option(__version__, prog_name="swapper")
def cli() -> None:
    """One GPU changes hands between llama-server and everything else; the conversations come back."""


def main() -> None:
    """The console script."""
    cli(prog_name="swapper")
