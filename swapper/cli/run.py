"""`swapper run -- CMD`: a command under a lease.

Invariant: the command starts only once the lease is granted, and the lease names its process, so that the card is
proved free when that process is gone. While it runs the lease is kept by heartbeats; when swapper is away for a
while the command goes on. However it ends, nothing of its process group lives on when the lease is given back, and
the exit status is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import click

from swapper.cli import FAILED, OUT_OF_TIME, REVOKED
from swapper.cli.common import Duration, Json, Server, out_of_time, server_options
from swapper.cli.gate import NOT_FOUND, GatedChild
from swapper.client import SwapperClient
from swapper.errors import ApiDown, ApiError, ApiRefused
from workers.control import launcher

_PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_CLASSES = ("interactive", "normal", "batch", "maintenance")
_LOST = (404, 409, 410)
_POLL_S = 20.0
_RELEASE_TRIES_S = (0.2, 0.5, 1.0, 2.0)
_RETRY_S = 1.0
_BEAT_S = 10.0
"""A heartbeat is also how a lease that was taken away is heard of, so a long ttl does not make them rarer than that."""
_KILLED_S = 5.0
_LOOK_S = 0.05


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: swapper run --card gpu0 --label encode --wait 2h -- ffmpeg -i in.mkv -c:v hevc_nvenc out.mkv",
)
@click.option("--card", help="Which card; without it any, whichever is free first.")
@click.option("--vram", default="all", help="How much of it: all, or a size such as 12GiB.", show_default=True)
@click.option("--class", "klass", type=click.Choice(_CLASSES), help="How urgent it is; normal where the key may.")
@click.option("--max-hold", type=Duration(), help="Longest it may be held; without it policy.max_hold, 1h.")
@click.option("--wait", type=Duration(), help="Give up after this long, with exit status 75; without it, never.")
@click.option("--label", help="What it is for; without it the command's name.")
@click.option("--ttl", type=Duration(), default="30s", help="Lost after this long without us.", show_default=True)
@click.option(
    "--grace", type=Duration(), default="30s", help="From TERM to KILL when the lease is revoked.", show_default=True
)
@server_options
@click.argument("command", nargs=-1, required=True, metavar="-- CMD...")
def run(
    server: Server,
    as_json: bool,
    command: tuple[str, ...],
    wait: float | None,
    grace: float,
    **options: Any,  # noqa: ANN401
) -> None:
    """Run a command under a lease of a card, with the card's device variables.

    Signals and the exit status are passed on; 75 when the wait ran out, 1 when the lease failed before the command
    was started, 70 when it was revoked or expired under the command. The command finds SWAPPER_LEASE, SWAPPER_TOKEN
    and SWAPPER_URL in its environment.
    """
    url, key = server.resolve()
    if shutil.which(command[0]) is None:
        click.echo(f"swapper run: {command[0]}: not found, no lease was requested", err=True)
        raise SystemExit(NOT_FOUND)
    names = {"klass": "class", "max_hold": "max_hold_s", "ttl": "ttl_s"}
    body = {names.get(name, name): value for name, value in options.items() if value is not None}
    body.setdefault("label", os.path.basename(command[0])[:200])
    raise SystemExit(lease_and_run(command, body, url=url, key=key, wait_s=wait, grace_s=grace, as_json=as_json))


def lease_and_run(
    command: Sequence[str],
    body: Json,
    *,
    url: str,
    key: str | None,
    wait_s: float | None,
    grace_s: float,
    as_json: bool = False,
) -> int:
    """The exit status of the command under a lease of `body`; forks, so call it before any thread is started."""
    child = GatedChild(command)
    try:
        process = _process(child.pid) if _is_here(url) else {}
        holder = _Holder(child, {**body, **process}, wait_s, grace_s, as_json)
        return asyncio.run(holder.hold(url, key))
    finally:
        child.abandon()
        child.close()


@dataclass
class _Holder:
    """One run. `ended` is set when the child is gone, `stop` when a signal came before it was started."""

    child: GatedChild
    body: Json
    wait_s: float | None
    grace_s: float
    as_json: bool
    started: bool = False
    stopped_by: int | None = None
    revoked: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self, url: str, key: str | None) -> int:
        loop = asyncio.get_running_loop()
        for number in (n for n in _PASSED if signal.getsignal(n) is not signal.SIG_IGN):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        async with SwapperClient(url, key) as client:
            return await self._with(client)

    async def _with(self, client: SwapperClient) -> int:
        asked = asyncio.create_task(self._ask(client))
        await self._first(asked, self.stop)
        lease = await asked
        waiting = asyncio.create_task(self._granted(client, lease))
        await self._first(waiting, self.stop)
        if self.stopped_by is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await self._give_back(client, lease["id"])
            return 128 + self.stopped_by
        lease = await waiting
        if lease["state"] != "granted":
            return await self._not_granted(client, lease)
        return await self._run(client, lease)

    async def _ask(self, client: SwapperClient) -> Json:
        """The lease, without our process where swapper does not see it: in a container its pids are others."""
        try:
            return await client.request_lease(self.body, idempotency_key=str(uuid4()))
        except ApiRefused as error:
            if error.status != 422 or not str(error).startswith("holder_pid: "):
                raise
            self._say(f"the command's process is not named in the lease ({error})")
        body = {name: value for name, value in self.body.items() if not name.startswith("holder_")}
        return await client.request_lease(body, idempotency_key=str(uuid4()))

    async def _granted(self, client: SwapperClient, lease: Json) -> Json:
        """The lease once it is granted or ended, or when the wait ran out; says why it waits, when that changes."""
        loop = asyncio.get_running_loop()
        deadline = None if self.wait_s is None else loop.time() + self.wait_s
        said = None
        while lease["state"] in ("queued", "preparing"):
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                break
            if lease["explain"] != said:
                hint = "" if said else " (Ctrl-C gives up)"
                said = lease["explain"]
                self._say(said, hint=hint, lease=lease["id"], state=lease["state"])
            try:
                lease = await client.wait(lease["id"], limit_s=_POLL_S if left is None else min(_POLL_S, left))
            except ApiDown as error:
                self._say(f"{error}; still waiting", lease=lease["id"])
        return lease

    async def _not_granted(self, client: SwapperClient, lease: Json) -> int:
        await self._give_back(client, lease["id"])
        ran_out = out_of_time(lease)
        why = f"the wait ran out ({lease['explain']})" if ran_out else f"the lease is {lease['explain']}"
        self._say(f"not started: {why}", lease=lease["id"], state=lease["state"], reason=lease["reason"])
        return OUT_OF_TIME if ran_out else FAILED

    async def _run(self, client: SwapperClient, lease: Json) -> int:
        env = {name: value for name, value in lease["env"].items() if value is not None}
        env |= {"SWAPPER_LEASE": lease["id"], "SWAPPER_TOKEN": str(lease["token"]), "SWAPPER_URL": client.url}
        hint = "; it is given back when the command ends"
        text = f"{lease['id']} granted on {lease['card']}"
        self._say(text, hint=hint, lease=lease["id"], state="granted", token=lease["token"])
        self.started = True
        self.child.open(env)
        keeping = asyncio.create_task(self._keep(client, lease))
        self._on_child()
        await self._first(keeping, self.ended)
        if not self.ended.is_set():
            await keeping
            await self._end_child()
        await self._end_rest()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await self._give_back(client, lease["id"], lease["token"])
        return REVOKED if self.revoked is not None else self.child.exit_status()

    async def _keep(self, client: SwapperClient, lease: Json) -> None:
        """Heartbeats, until the lease is to be left; `revoked` then says why."""
        usual = pause = min(lease["ttl_s"] / 3, _BEAT_S)
        while True:
            await asyncio.sleep(pause)
            try:
                alive = await client.heartbeat(lease["id"], lease["token"])
            except ApiError as error:
                if isinstance(error, ApiRefused) and error.status in _LOST:
                    self.revoked = str(error)
                    return
                if pause != _RETRY_S:
                    self._say(f"{error}; the command goes on", lease=lease["id"])
                pause = _RETRY_S
                continue
            pause = usual
            if alive["revoke_at"] is not None:
                left = (datetime.fromisoformat(alive["revoke_at"]) - datetime.now(UTC)).total_seconds()
                self.grace_s = min(self.grace_s, max(left, 1.0))
                self.revoked = f"asked to leave by {alive['revoke_at']}"
                return

    async def _end_child(self) -> None:
        self._say(f"the lease is lost, ending the command: {self.revoked}", state="revoked")
        self.child.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self.ended.wait()
        self.child.signal(signal.SIGKILL)
        await self.ended.wait()

    async def _end_rest(self) -> None:
        """What the command left behind in its group ends, too: it may use a card that is given to somebody else now."""
        if self.child.left() and self.revoked is None:
            self._say("the command has ended, ending what it left running")
            self.child.signal(signal.SIGTERM)
            await self._nothing_left(self.grace_s)
        if self.child.left():
            self.child.signal(signal.SIGKILL)
            await self._nothing_left(_KILLED_S)

    async def _nothing_left(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        while self.child.left():
            if loop.time() >= until:
                return
            await asyncio.sleep(_LOOK_S)

    async def _give_back(self, client: SwapperClient, lease_id: str, token: int | None = None) -> None:
        """Release, or cancel while it waits; tried a few times, then left to its ttl."""
        granted_meanwhile = False
        for pause in (*_RELEASE_TRIES_S, None):
            try:
                if granted_meanwhile:
                    token = (await client.lease(lease_id))["token"]
                await client.release(lease_id, token=token)
                return
            except ApiRefused as error:
                if error.status != 409 or token is not None:
                    return
                granted_meanwhile = True
            except ApiDown as error:
                if pause is None:
                    hint = f"; at once: swapper lease release {lease_id}"
                    self._say(f"the lease was not given back and will expire: {error}", hint=hint, lease=lease_id)
                else:
                    await asyncio.sleep(pause)

    async def _first(self, task: asyncio.Task[Any], event: asyncio.Event) -> None:
        """Return when the task is done or the event set."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def _on_signal(self, number: int) -> None:
        if self.started:
            self.child.signal(number)
        else:
            self.stopped_by = number
            self.stop.set()

    def _on_child(self) -> None:
        if self.child.poll():
            self.ended.set()

    def _say(self, text: str, *, hint: str = "", **facts: object) -> None:
        """On standard error: standard output belongs to the command. The hint is for people only."""
        click.echo(json.dumps({"message": text, **facts}) if self.as_json else f"swapper run: {text}{hint}", err=True)


def _process(pid: int) -> Json:
    """What a lease says of its holder's process: its pid may be another's once it has ended, its start never."""
    stat = launcher.stat_of(pid)
    return {} if stat is None else {"holder_pid": pid, "holder_started": stat[3]}


def _is_here(url: str) -> bool:
    """True when swapper runs on this machine, so that our process ids mean something to it."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")
