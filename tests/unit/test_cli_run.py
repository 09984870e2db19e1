"""`swapper run`: a real process tree around a served API."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator

import psutil
import pytest

from swapper.core.types import LeaseState
from swapper.store.protocol import LeaseFilter
from tests.support.api import Served, served

SAYS_WHEN_READY = "trap 'echo got TERM; exit 5' TERM; echo ready; while :; do sleep 1 & wait $!; done"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 1 & wait $!; done"


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


async def start(api: Served, *args: str) -> Process:
    env = {**os.environ, "SWAPPER_URL": api.url}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swapper", "run", *args, stdout=PIPE, stderr=PIPE, stdin=asyncio.subprocess.DEVNULL,
        env=env,
    )  # fmt: skip


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def ended(process: Process) -> tuple[int, str, str]:
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def state(api: Served, lease_id: str) -> LeaseState:
    lease = await api.store.lease(lease_id)
    assert lease is not None
    return lease.state


async def test_the_command_runs_under_the_lease_that_names_its_process(api: Served) -> None:
    process = await start(api, "--label", "x", "--", "sh", "-c", "echo $$ $SWAPPER_LEASE $SWAPPER_TOKEN; exit 7")
    lease_id = await api.granted_when_queued()
    status, out, err = await ended(process)
    assert f"{lease_id} granted on gpu0; it is given back when the command ends\n" in err
    lease = await api.store.lease(lease_id)
    assert lease is not None
    assert status == 7
    assert out.split() == [str(lease.request.holder_pid), lease.id, str(lease.token)]
    assert (lease.state, lease.request.label) == (LeaseState.RELEASED, "x")


async def test_the_holder_exists_but_starts_nothing_before_the_grant(api: Served) -> None:
    process = await start(api, "--", "sh", "-c", "echo started")
    queued = next(iter(await api.store.events(after="0", limit=1, block_ms=20_000)))
    lease = await api.store.lease(queued.subject)
    assert lease is not None
    assert lease.request.holder_pid is not None
    holder = psutil.Process(lease.request.holder_pid)
    assert holder.ppid() == process.pid
    assert holder.children() == []
    await api.grant(lease.id)
    assert (await ended(process))[1] == "started\n"
    assert await state(api, lease.id) == LeaseState.RELEASED


async def test_the_lease_knows_its_process_by_the_start_too(api: Served) -> None:
    process = await start(api, "--", "sh", "-c", "cut -d ' ' -f 22 /proc/$$/stat")
    lease = await api.store.lease(await api.granted_when_queued())
    assert lease is not None
    assert (await ended(process))[1].strip() == str(lease.request.holder_started)


async def test_where_swapper_sees_other_processes_the_lease_names_none_and_the_command_runs(api: Served) -> None:
    api.ctx.whose = lambda pid: f"a process of the server llama, {pid} there"
    process = await start(api, "--", "sh", "-c", "echo ran")
    lease = await api.store.lease(await api.granted_when_queued())
    assert lease is not None
    _, out, err = await ended(process)
    assert (out, lease.request.holder_pid, lease.request.holder_started) == ("ran\n", None, None)
    assert "the command's process is not named in the lease (holder_pid: " in err


async def test_a_wait_that_runs_out_is_75_and_cancels_the_lease(api: Served) -> None:
    process = await start(api, "--wait", "100ms", "--", "sh", "-c", "echo started")
    status, out, err = await ended(process)
    assert (status, out) == (75, "")
    assert "not started: the wait ran out (queued, number 1" in err
    assert err.count("(Ctrl-C gives up)") == 1
    page = await api.store.leases(LeaseFilter())
    assert [lease.state for lease in page.items] == [LeaseState.CANCELLED]


async def test_a_lease_that_fails_is_1_with_its_reason_and_starts_nothing(api: Served) -> None:
    process = await start(api, "--", "sh", "-c", "echo started")
    queued = next(iter(await api.store.events(after="0", limit=1, block_ms=20_000)))
    await api.change(queued.subject, LeaseState.FAILED, reason="a conversation could not be saved")
    status, out, err = await ended(process)
    assert (status, out) == (1, "")
    assert "not started: the lease is failed: a conversation could not be saved\n" in err


async def test_a_deadline_that_passes_is_75(api: Served) -> None:
    process = await start(api, "--", "sh", "-c", "echo started")
    queued = next(iter(await api.store.events(after="0", limit=1, block_ms=20_000)))
    await api.change(queued.subject, LeaseState.EXPIRED, reason="its deadline passed")
    status, _, err = await ended(process)
    assert (status, "its deadline passed" in err) == (75, True)


async def test_a_signal_while_waiting_cancels_the_lease(api: Served) -> None:
    process = await start(api, "--", "sh", "-c", "echo started")
    queued = next(iter(await api.store.events(after="0", limit=1, block_ms=20_000)))
    process.send_signal(signal.SIGTERM)
    status, out, _ = await ended(process)
    assert (status, out) == (128 + signal.SIGTERM, "")
    assert await state(api, queued.subject) == LeaseState.CANCELLED


async def test_a_lease_granted_as_the_signal_comes_is_released(api: Served) -> None:
    """The DELETE meets a granted lease: the run asks for its token and gives it back all the same."""
    process = await start(api, "--", "sh", "-c", "echo started")
    queued = next(iter(await api.store.events(after="0", limit=1, block_ms=20_000)))
    process.send_signal(signal.SIGSTOP)
    await api.grant(queued.subject)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    await ended(process)
    assert await state(api, queued.subject) == LeaseState.RELEASED


async def test_signals_reach_the_command_and_its_status_comes_back(api: Served) -> None:
    process = await start(api, "--", "bash", "-c", SAYS_WHEN_READY)
    lease_id = await api.granted_when_queued()
    assert await line(process) == "ready"
    process.send_signal(signal.SIGTERM)
    status, out, _ = await ended(process)
    assert (status, out) == (5, "got TERM\n")
    assert await state(api, lease_id) == LeaseState.RELEASED


async def test_a_command_killed_by_a_signal_is_128_and_its_number(api: Served) -> None:
    process = await start(api, "--", "sh", "-c", "kill -KILL $$")
    await api.granted_when_queued()
    assert (await ended(process))[0] == 128 + signal.SIGKILL


async def test_a_revoked_lease_ends_the_command_with_70(api: Served) -> None:
    process = await start(api, "--ttl", "5s", "--", "bash", "-c", SAYS_WHEN_READY)
    lease_id = await api.granted_when_queued()
    assert await line(process) == "ready"
    await api.change(lease_id, LeaseState.REVOKED, reason="held longer than max_hold")
    status, out, err = await ended(process)
    assert (status, out) == (70, "got TERM\n")
    assert "held longer than max_hold" in err


async def test_a_command_that_ignores_term_is_killed_after_the_grace(api: Served) -> None:
    process = await start(api, "--ttl", "5s", "--grace", "100ms", "--", "bash", "-c", STUBBORN)
    lease_id = await api.granted_when_queued()
    assert await line(process) == "ready"
    await api.change(lease_id, revoke_ms=1_900_000_000_000)
    status, _, err = await ended(process)
    assert status == 70
    assert "asked to leave by 2030-03-17" in err
    assert await state(api, lease_id) == LeaseState.RELEASED


async def test_the_command_outlives_a_silence_of_swapper(api: Served) -> None:
    process = await start(api, "--ttl", "5s", "--", "bash", "-c", SAYS_WHEN_READY)
    lease_id = await api.granted_when_queued()
    assert await line(process) == "ready"
    api.redis.connected = False
    assert process.stderr is not None
    while "the command goes on" not in (said := (await process.stderr.readline()).decode()):
        assert said
    api.redis.connected = True
    before = await api.store.lease(lease_id)
    beaten = before
    while beaten == before:
        beaten = await api.store.lease(lease_id)
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert (await ended(process))[0] == 5
    assert await state(api, lease_id) == LeaseState.RELEASED


async def test_the_command_ends_with_a_run_that_was_killed(api: Served) -> None:
    process = await start(api, "--", "bash", "-c", SAYS_WHEN_READY)
    await api.granted_when_queued()
    assert await line(process) == "ready"
    process.kill()
    status, out, _ = await ended(process)
    assert (status, out) == (-signal.SIGKILL, "got TERM\n")


async def test_the_command_sees_the_device_variables_of_its_card_and_keeps_what_the_card_says_nothing_of(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    api.ctx.env = {"gpu0": {"CUDA_VISIBLE_DEVICES": "GPU-1", "HIP_VISIBLE_DEVICES": None}}
    process = await start(api, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES $SWAPPER_URL")
    await api.granted_when_queued()
    assert (await ended(process))[1] == f"GPU-1 3 {api.url}\n"


async def test_what_the_command_left_running_has_ended_when_the_card_is_given_back(api: Served) -> None:
    """It is asked to first; what does not hear is killed."""
    stays = "trap '' TERM USR1; echo $BASHPID; while :; do sleep 1; done"
    leaves = f"trap 'exit 3' USR1; ({stays}) & while :; do sleep 1 & wait $!; done"
    process = await start(api, "--grace", "100ms", "--", "bash", "-c", leaves)
    lease_id = await api.granted_when_queued()
    left = psutil.Process(int(await line(process)))
    process.send_signal(signal.SIGUSR1)
    after = "0"
    while (await state(api, lease_id)) != LeaseState.RELEASED:
        for event in await api.store.events(after=after, limit=100, block_ms=5_000):
            after = event.id
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    status, _, err = await ended(process)
    assert (status, "the command has ended, ending what it left running" in err) == (3, True)


async def test_a_command_that_leaves_nothing_running_is_not_said_to(api: Served) -> None:
    process = await start(api, "--", "sh", "-c", "exit 4")
    await api.granted_when_queued()
    status, _, err = await ended(process)
    assert (status, "left running" in err) == (4, False)


async def test_a_long_ttl_does_not_keep_it_from_hearing_that_the_lease_is_lost(api: Served) -> None:
    process = await start(api, "--ttl", "1h", "--", "bash", "-c", SAYS_WHEN_READY)
    lease_id = await api.granted_when_queued()
    assert await line(process) == "ready"
    await api.change(lease_id, LeaseState.REVOKED, reason="held longer than max_hold")
    async with asyncio.timeout(30):
        status, out, _ = await ended(process)
    assert (status, out) == (70, "got TERM\n")


async def test_a_command_that_is_not_there_is_127_and_asks_for_nothing(api: Served) -> None:
    status, _, err = await ended(await start(api, "--", "no-such-program"))
    assert status == 127
    assert "no-such-program: not found" in err
    assert (await api.store.leases(LeaseFilter())).items == ()


async def test_the_command_has_the_terminal_and_ctrl_z_does_not_stop_it(api: Served) -> None:
    """Ctrl-Z first, which is undone at once; then Ctrl-C, which the command alone gets.

    The command sleeps in short naps: signal.pause() would sleep through a signal that came just before it.
    """
    inside = (
        "import os, signal, sys, time\n"
        "print('foreground', os.tcgetpgrp(0) == os.getpgrp(), flush=True)\n"
        "signal.signal(signal.SIGCONT, lambda *_: print('went on', flush=True))\n"
        "try:\n    print('ready', flush=True)\n    while True: time.sleep(0.05)\n"
        "except KeyboardInterrupt:\n    print('interrupted'); sys.exit(9)"
    )
    on_a_terminal = (  # which lets Ctrl-C through even if whoever runs the tests ignores it
        "import os, pty, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    )
    run = (sys.executable, "-m", "swapper", "run", "--url", api.url, "--", sys.executable, "-c", inside)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", on_a_terminal, *run, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    lease_id = await api.granted_when_queued()
    assert process.stdin is not None
    seen: list[str] = []
    for until, keys in (("ready", b"\x1a"), ("went on", b"\x03")):
        while not seen or until not in seen[-1]:
            seen.append(await line(process))
        process.stdin.write(keys)
    status, out, _ = await ended(process)
    assert "foreground True" in seen
    assert (status, "interrupted" in out) == (9, True)
    assert await state(api, lease_id) == LeaseState.RELEASED
