"""A store is put back to an older copy that knows nothing of a job which runs: its card is given on when it is gone."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_processes import processes
from tests.support.matrix import Held
from tests.support.server import Json, serving

SCRIPT = "trap 'read word <$0; exit' TERM; echo begun >$1; while :; do sleep 1 & wait $!; done"
RECIPE = """
recipes:
  lingers:
    command: [sh, -c, "{script}", "{{word}}", "{{begun}}"]
    params: {{word: path, begun: path}}
    roots: [{root}]
    grace: 60s
"""


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    server = Held.of_alpha(tmp_path_factory.mktemp("putback"))
    with server.config.open("a") as config:
        config.write(RECIPE.format(script=SCRIPT, root=server.folder))
    for name in ("word", "begun"):
        os.mkfifo(server.folder / name)
    with serving(server):
        yield server


@pytest.fixture
def kept(living: Held) -> Path:
    """The store's data of before the job."""
    kept = living.folder / "before"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(living.state_dir / "store" / "appendonlydir", kept)
    return kept


def put_back(server: Held, kept: Path) -> None:
    there = server.state_dir / "store" / "appendonlydir"
    for file in there.iterdir():
        file.unlink()
    for file in kept.iterdir():
        shutil.copy2(file, there / file.name)


def running(server: Held) -> Json:
    job = server.post("/api/jobs", {"recipe": "lingers", "params": {name: name for name in ("word", "begun")}})
    assert (server.folder / "begun").read_text() == "begun\n"
    return job


def ends_only_now(server: Held, job: Json) -> None:
    """The next lease is granted once the job has ended, and no earlier."""
    assert processes(job), "nothing ends it before it may"
    early = server.lease("next", wait=4)
    assert early["state"] in ("queued", "preparing")  # queued while what the store has as resident is to come back
    assert processes(job)
    assert server.get("/api/status")["cards"][0]["phase"] == "vacate"  # pyright: ignore
    told = threading.Thread(target=(server.folder / "word").write_text, args=("go\n",), daemon=True)
    told.start()
    granted = server.get(f"/api/leases/{early['id']}?wait=60")
    assert (granted["state"], processes(job)) == ("granted", [])
    told.join(10)
    server.release(granted)
    server.until(lambda status: [c for c in status["cards"] if c["residents"] and c["phase"] == "steady"])  # pyright: ignore


def test_under_a_living_serve(living: Held, kept: Path) -> None:
    job = running(living)
    living.freeze()
    living.kill_store()
    put_back(living, kept)
    living.go_on()
    living.wait_ready()
    ends_only_now(living, job)


def test_while_all_is_down(living: Held, kept: Path) -> None:
    job = running(living)
    living.kill()
    living.kill_store()
    put_back(living, kept)
    living.start()
    ends_only_now(living, job)
