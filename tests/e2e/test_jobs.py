"""Jobs on a real serve with a real ffmpeg: nothing of them is left unrecorded, and no half file has the final name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.support.job_processes import processes
from tests.support.server import Json, Server

SECONDS = 8
"""How long the film is: at its own speed an encode takes as long."""
JOB = (sys.executable, "-m", "swapper", "job")
RECIPES = """
recipes:
  film:
    command: [ffmpeg, -y, -re, -i, "{{input}}", -c:v, libx264, -preset, ultrafast, "{{output}}"]
    params: {{input: path, output: path}}
    roots: [{root}]
    max_hold: 1h
    grace: 10s
  waits:
    command: [sh, -c, "echo begun; read word <$0 && echo $word >$1", "{{input}}", "{{output}}"]
    params: {{input: path, output: path}}
    roots: [{root}]
    env: [GIVEN]
  quick:
    command: [ffmpeg, -y, -i, "{{input}}", -c, copy, "{{output}}"]
    params: {{input: path, output: path}}
    roots: [{root}]
  brief:
    command: [ffmpeg, -y, -re, -i, "{{input}}", -c:v, libx264, -preset, ultrafast, "{{output}}"]
    params: {{input: path, output: path}}
    roots: [{root}]
    max_hold: 2s
    grace: 10s
  deaf:
    command: [sh, -c, "trap '' TERM; echo begun | tee {{output}}; while :; do sleep 1; done"]
    params: {{output: path}}
    roots: [{root}]
    grace: 1s
  env:
    command: [sh, -c, "echo $SWAPPER_LEASE $SWAPPER_TOKEN >{{output}}; exit 3"]
    params: {{output: path}}
    roots: [{root}]
  nothing:
    command: ["true", "{{output}}"]
    params: {{output: path}}
    roots: [{root}]
  leaves:
    command: [sh, -c, "(trap '' TERM; sleep 600; sleep 600) & echo done >{{output}}; exit $0", "{{code}}"]
    params: {{output: path, code: int}}
    roots: [{root}]
    grace: 1s
  folder:
    command: [mkdir, "{{output}}"]
    params: {{output: path}}
    roots: [{root}]
  gone:
    command: [no-such-program, "{{output}}"]
    params: {{output: path}}
    roots: [{root}]
"""


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media").resolve()
    words = ["-f", "lavfi", "-i", f"testsrc2=size=128x72:rate=10:duration={SECONDS}", "-c:v", "libx264"]
    subprocess.run(["ffmpeg", "-v", "error", "-y", *words, folder / "in.mp4"], check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, media: Path) -> Iterator[Server]:
    server = Server.of_alpha(tmp_path_factory.mktemp("jobs"))
    with server.config.open("a") as config:
        config.write(RECIPES.format(root=media))
    server.env = {"GIVEN": "yes", "ANN_KEY": "secret"}
    server.router.start()
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.router.stop()


def command(server: Server, *words: str) -> str:
    done = subprocess.run([*JOB, *words, "--url", server.url], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(server: Server, recipe: str, media: Path, **params: str | int) -> Json:
    return server.post("/api/jobs", {"recipe": recipe, "params": {"output": str(media / "out.mp4")} | params})


def over(server: Server, job: Json) -> Json:
    return server.get(f"/api/jobs/{job['id']}?wait=60")


def running(server: Server, job: Json) -> Json:
    """The job once its process runs and has written something."""
    with urllib.request.urlopen(f"{server.url}/api/jobs/{job['id']}/log?follow=1", timeout=60) as answer:
        assert answer.read(1), f"{job['id']} has ended and has said nothing"
    return server.get(f"/api/jobs/{job['id']}")


def files(media: Path) -> list[str]:
    return sorted(path.name for path in media.iterdir())


@pytest.fixture
def word(media: Path) -> Iterator[Path]:
    """A pipe that the recipe `waits` reads: it ends well once a word comes."""
    os.mkfifo(pipe := media / "word")
    yield pipe
    pipe.unlink()


@pytest.fixture(autouse=True)
def nothing_left(server: Server, media: Path) -> Iterator[None]:
    yield
    for job in cast("list[Json]", server.get("/api/jobs")["items"]):  # what a test that failed has left
        if job["state"] in ("queued", "running"):
            server.delete(f"/api/jobs/{job['id']}?wait=30")
    for lease in cast("list[Json]", server.get("/api/leases?state=granted")["items"]):
        server.release(lease)
    back(server)
    (media / "out.mp4").unlink(missing_ok=True)
    assert files(media) == ["in.mp4"]


def back(server: Server) -> None:
    """The resident is back once the lease is given back."""
    server.until(lambda status: [c for c in status["cards"] if c["residents"] and c["phase"] == "steady"])  # pyright: ignore


def test_an_encode_takes_the_card_tells_its_progress_and_leaves_its_file(server: Server, media: Path) -> None:
    job = submit(server, "quick", media, input="in.mp4")
    assert (job["state"], job["recipe"], job["params"]) == (
        "queued", "quick", {"input": str(media / "in.mp4"), "output": str(media / "out.mp4")}
    )  # fmt: skip
    done = over(server, job)
    assert (done["state"], done["reason"], done["exit"], done["progress"]) == ("done", None, 0, 1.0)
    assert files(media) == ["in.mp4", "out.mp4"]
    lease = server.get(f"/api/leases/{job['lease']}")
    assert (lease["state"], lease["holder"]) == ("released", f"job:{job['id']}")
    back(server)
    probe = ["ffprobe", "-v", "error", "-show_entries", "format=duration", "-of", "csv=p=0", media / "out.mp4"]
    assert float(subprocess.run(probe, check=True, capture_output=True, timeout=20).stdout) == pytest.approx(SECONDS, 1)


def test_cancelled_it_is_gone_with_what_it_had_written(server: Server, media: Path) -> None:
    job = running(server, submit(server, "film", media, input="in.mp4"))
    assert files(media) == [f".out.{job['id']}.mp4", "in.mp4"]
    ended = server.delete(f"/api/jobs/{job['id']}?wait=30")
    assert (ended["state"], ended["reason"]) == ("cancelled", "it was cancelled")
    assert processes(job) == []
    assert files(media) == ["in.mp4"]


def test_one_that_waits_is_cancelled_at_once(server: Server, media: Path) -> None:
    lease = server.lease("somebody", wait=30)
    job = submit(server, "film", media, input="in.mp4")
    assert server.get(f"/api/jobs/{job['id']}")["explain"]
    ended = server.delete(f"/api/jobs/{job['id']}?wait=10")
    assert (ended["state"], ended["reason"]) == ("cancelled", "it was cancelled before it began")
    assert server.get(f"/api/leases/{job['lease']}")["state"] == "cancelled"
    server.release(lease)


def test_one_that_holds_the_card_too_long_is_ended_and_says_so(server: Server, media: Path) -> None:
    ended = over(server, submit(server, "brief", media, input="in.mp4"))
    assert ended["state"] == "failed"
    assert ended["reason"] == "its lease was revoked: held longer than its max_hold of 2 s"
    assert processes(ended) == []
    assert files(media) == ["in.mp4"]


def test_one_that_does_not_hear_is_killed_after_its_grace(server: Server, media: Path) -> None:
    job = running(server, submit(server, "deaf", media))
    ended = server.delete(f"/api/jobs/{job['id']}?wait=30")
    assert (ended["state"], ended["exit"]) == ("cancelled", -9)
    assert processes(job) == []


def test_the_card_is_not_given_on_before_a_revoked_job_is_gone(server: Server, media: Path) -> None:
    job = submit(server, "brief", media, input="in.mp4")
    lease = server.lease("next", wait=60)
    assert lease["state"] == "granted"
    assert processes(job) == []
    server.release(lease)


def test_swapper_killed_meanwhile_finds_it_again_and_it_finishes(server: Server, media: Path, word: Path) -> None:
    job = running(server, submit(server, "waits", media, input="word"))
    (process,) = processes(job)
    server.kill()
    server.start()
    (found,) = processes(job)
    assert found == process
    word.write_text("go\n")
    done = over(server, job)
    assert (done["state"], done["exit"], (media / "out.mp4").read_text()) == ("done", 0, "go\n")
    assert files(media) == ["in.mp4", "out.mp4", "word"]


def test_a_job_gets_of_swappers_environment_what_its_recipe_names(server: Server, media: Path, word: Path) -> None:
    job = running(server, submit(server, "waits", media, input="word"))
    (process,) = processes(job)
    found = process.environ()
    word.write_text("go\n")
    over(server, job)
    assert found["GIVEN"] == "yes"
    assert "ANN_KEY" not in found
    assert found["PATH"] == os.environ["PATH"]


def test_a_lease_names_the_process_of_its_job(server: Server, media: Path, word: Path) -> None:
    job = running(server, submit(server, "waits", media, input="word"))
    (process,) = processes(job)
    (hold,) = server.get("/api/status")["cards"][0]["holds"]  # pyright: ignore
    word.write_text("go\n")
    over(server, job)
    assert (hold["lease"], hold["pid"]) == (job["lease"], process.pid)


def test_swapper_killed_meanwhile_and_the_job_over_before_it_is_back(server: Server, media: Path) -> None:
    job = running(server, submit(server, "film", media, input="in.mp4"))
    (process,) = [p for p in processes(job) if p.name() == "ffmpeg"]
    server.kill()
    process.kill()
    process.wait(10)
    server.start()
    ended = over(server, job)
    assert (ended["state"], ended["exit"]) == ("failed", -9)
    assert "ended by SIGKILL" in str(ended["reason"])
    assert files(media) == ["in.mp4"]


def test_a_cancel_that_swapper_did_not_live_to_carry_out_is_carried_out_afterwards(server: Server, media: Path) -> None:
    job = running(server, submit(server, "deaf", media))
    server.delete(f"/api/jobs/{job['id']}")
    server.kill()
    server.start()
    ended = over(server, job)
    assert (ended["state"], ended["reason"]) == ("cancelled", "it was cancelled")
    assert processes(job) == []


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("env", "exit status 3"),
        ("nothing", "it ended with exit status 0 and left no"),
        ("gone", "No such file or directory: no-such-program"),
    ],
)
def test_one_that_fails_says_how(server: Server, media: Path, recipe: str, said: str) -> None:
    ended = over(server, submit(server, recipe, media))
    assert ended["state"] == "failed"
    assert said in str(ended["reason"])


@pytest.mark.parametrize(("code", "state"), [(0, "done"), (3, "failed")])
def test_what_it_leaves_behind_is_ended_before_its_card_is_given_back(
    server: Server, media: Path, code: int, state: str
) -> None:
    ended = over(server, submit(server, "leaves", media, code=code))
    assert (ended["state"], ended["exit"]) == (state, code)
    assert processes(ended) == []


def test_one_whose_folder_is_gone_is_not_started_a_second_time(server: Server, media: Path, word: Path) -> None:
    job = running(server, submit(server, "waits", media, input="word"))
    (process,) = processes(job)
    server.kill()
    shutil.rmtree(server.state_dir / "jobs")
    server.start()
    ended = over(server, job)
    assert ended["state"] == "failed"
    assert str(ended["reason"]).endswith("is gone, and with it how it ended")
    process.kill()
    process.wait(10)


def test_a_name_as_long_as_a_name_may_be_is_no_hindrance(server: Server, media: Path) -> None:
    name = "x" * 251 + ".mp4"
    ended = over(server, submit(server, "quick", media, input="in.mp4", output=name))
    assert (ended["state"], ended["reason"]) == ("done", None)
    assert files(media) == ["in.mp4", name]
    (media / name).unlink()


def test_one_that_makes_a_folder_of_its_output_fails_and_leaves_nothing(server: Server, media: Path) -> None:
    ended = over(server, submit(server, "folder", media))
    assert (ended["state"], ended["reason"]) == ("failed", f"it ended with exit status 0 and left no {media}/out.mp4")


def test_a_folder_that_leads_elsewhere_by_the_time_it_begins_is_not_written_to(
    server: Server, media: Path, tmp_path: Path
) -> None:
    lease = server.lease("somebody", wait=30)
    (media / "sub").mkdir()
    job = submit(server, "quick", media, input="in.mp4", output="sub/out.mp4")
    (media / "sub").rmdir()
    (media / "sub").symlink_to(tmp_path)
    server.release(lease)
    ended = over(server, job)
    (media / "sub").unlink()
    assert ended["state"] == "failed"
    assert f"params.output: {media}/sub/out.mp4 is not below {media}" in str(ended["reason"])
    assert list(tmp_path.iterdir()) == []


def test_what_it_says_can_be_read_and_followed(server: Server, media: Path) -> None:
    job = submit(server, "quick", media, input="in.mp4")
    with urllib.request.urlopen(f"{server.url}/api/jobs/{job['id']}/log?follow=1", timeout=60) as answer:
        text = answer.read().decode()
    assert "Input #0" in text
    assert over(server, job)["state"] == "done"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"recipe": "flim"}, 422, "'flim' is no recipe of the configuration; did you mean film?"),
        ({"recipe": "film", "params": {"input": "in.mp4"}}, 422, "params.output: is missing"),
        ({"recipe": "film", "params": {"input": "/etc/passwd", "output": "x"}}, 422, "/etc/passwd is not below"),
        ({"recipe": "film", "command": ["rm"]}, 422, "command: there is no such field"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(server: Server, body: Json, status: int, said: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/api/jobs", body)
    with refused.value as answer:
        assert answer.code == status
        assert said in json.loads(answer.read())["detail"]


def test_the_command_line_submits_shows_and_lists(server: Server, media: Path) -> None:
    words = ["submit", "quick", f"input={media}/in.mp4", f"output={media}/out.mp4", "--wait", "1m"]
    assert " quick done 100%\n" in command(server, *words)
    (newest, *_) = json.loads(command(server, "list", "--json"))["items"]
    assert newest["state"] == "done"
    assert "Input #0" in command(server, "log", newest["id"])
    assert f"output = {media}/out.mp4" in command(server, "show", newest["id"])
    failed = subprocess.run([*JOB, "submit", "env", f"output={media}/out.mp4", "--wait", "1m", "--url", server.url])
    assert failed.returncode == 1
    wrong = subprocess.run([*JOB, "submit", "env", "output", "--url", server.url], capture_output=True, text=True)
    assert (wrong.returncode, "write NAME=VALUE" in wrong.stderr) == (2, True)
