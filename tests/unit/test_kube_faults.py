"""Control `kubernetes` on an API that fails, is overloaded, restarts or cuts its answers; and its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from swapper.errors import BackendDown, BackendRefused
from tests.contract.controls import until
from tests.support.fake_kube import TOKEN, FakeKube
from workers.control import Phase
from workers.control.kube import Cluster
from workers.control.kubernetes import KEPT, KubernetesControl
from workers.control.kubetoken import Tokens

REQUESTS = (
    ("GET", "/deployments/ml"),
    ("PATCH", "/deployments/ml"),
    ("PATCH", "/deployments/ml/scale"),
    ("GET", "/deployments/ml/scale"),
    ("GET", "/pods"),
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.control.kubernetes._PAUSES_S", (0.01, 0.05))
    monkeypatch.setattr("workers.control.kube.ANSWER_S", 0.5)


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    kube = await FakeKube().start()
    kube.brisk = True
    kube.deploy("ml", 2)
    yield kube
    await kube.stop()


@pytest.fixture
async def control(kube: FakeKube) -> AsyncIterator[KubernetesControl]:
    where = Cluster(kube.url, token=TOKEN, namespace="immich")
    control = KubernetesControl("tenant", "ml", find=lambda: where)
    yield control
    await control.close()


def replicas(kube: FakeKube) -> int:
    return kube.deployments["ml"]["spec"]["replicas"]


@pytest.mark.parametrize("how", [500, 503, 429, "cut", "half", "lost", "silent"])
async def test_one_answer_that_fails_at_any_step_of_a_release_or_a_start_is_asked_for_again(
    kube: FakeKube, control: KubernetesControl, how: int | str
) -> None:
    for method, end in REQUESTS:
        kube.fault(how, method, end)
    await control.stop(5_000)
    assert (replicas(kube), kube.pods) == (0, {})
    assert kube.deployments["ml"]["metadata"]["annotations"] == {KEPT: "2"}
    for method, end in (REQUESTS[0], REQUESTS[2]):
        kube.fault(how, method, end)
    await control.ensure()
    assert replicas(kube) == 2


async def test_an_api_that_restarts_during_a_release_ends_it_no_sooner_than_the_pods_do(
    kube: FakeKube, control: KubernetesControl
) -> None:
    kube.brisk = False
    stopping = asyncio.ensure_future(control.stop(20_000))
    await until(control, Phase.STOPPING)
    await kube.stop()
    await until(control, Phase.UNREACHABLE)
    assert not stopping.done(), "no answer says nothing"
    await kube.start()
    assert (await until(control, Phase.STOPPING)).containers
    assert not stopping.done()
    kube.vanish("ml")
    await stopping


@pytest.mark.parametrize("step", ["before anything", "while its pods leave"])
async def test_an_api_that_fails_to_the_end_of_the_releases_time_is_told(
    kube: FakeKube, control: KubernetesControl, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr("workers.control.kubernetes._LEAVE_S", 0.1)
    end = "/deployments/ml" if step == "before anything" else "/pods"
    kube.fault(503, "GET", end, times=1000)
    said = f"the Kubernetes API at {kube.url} fails with 503"
    if end == "/pods":
        said = f"the Deployment immich/ml was scaled to 0, and whether its pods are gone is not told: {said}"
    with pytest.raises(BackendDown) as told:
        await control.stop(100)
    assert str(told.value) == said


async def test_a_start_does_not_wait_for_an_api_for_as_long_as_a_release(
    kube: FakeKube, control: KubernetesControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.control.kubernetes._START_S", 0.1)
    await kube.stop()
    with pytest.raises(BackendDown, match="does not answer"):
        await control.ensure()


async def test_what_is_refused_is_not_asked_for_again(kube: FakeKube, control: KubernetesControl) -> None:
    kube.denied = {("patch", "deployments/scale")}
    with pytest.raises(BackendRefused):
        await control.stop(20_000)
    assert sum(one.startswith("PATCH") and one.endswith("/scale") for one in kube.requests) == 1


# ---- tokens


class Plugin:
    """A program that gives tokens, and notes each time that it is run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.gives(TOKEN)

    def gives(self, token: str, until: str | None = None) -> None:
        more = f', "expirationTimestamp": "{until}"' if until else ""
        (self._folder / "says").write_text(f'{{"status": {{"token": "{token}"{more}}}}}')

    @property
    def command(self) -> dict[str, object]:
        return {"command": "sh", "args": ["-c", f"cd {self._folder}; echo x >> runs; cat says"]}

    @property
    def runs(self) -> int:
        with suppress(FileNotFoundError):
            return len((self._folder / "runs").read_text().split())
        return 0


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


@asynccontextmanager
async def asking(kube: FakeKube, plugin: Plugin) -> AsyncGenerator[KubernetesControl]:
    control = KubernetesControl("t", "ml", "immich", lambda: Cluster(kube.url, command=plugin.command))
    try:
        yield control
    finally:
        await control.close()


async def test_a_program_that_gives_a_token_is_run_once_for_all_that_asks(kube: FakeKube, plugin: Plugin) -> None:
    async with asking(kube, plugin) as control:
        looks = await asyncio.gather(*(control.look() for _ in range(4)))
        assert {seen.phase for seen in looks} == {Phase.UP}
        await control.stop(5_000)
        assert plugin.runs == 1


async def test_it_is_run_again_when_its_token_is_refused_and_what_was_asked_is_asked_again(
    kube: FakeKube, plugin: Plugin
) -> None:
    async with asking(kube, plugin) as control:
        await control.look()
        kube.token = "the next"
        seen = await control.look()
        assert (seen.phase, seen.why, plugin.runs) == (Phase.UNREACHABLE, "Unauthorized", 2)
        plugin.gives("the next")
        assert (await control.look()).phase is Phase.UP
        assert plugin.runs == 3


async def test_a_watch_whose_token_is_refused_has_the_next_one(kube: FakeKube, plugin: Plugin) -> None:
    async with asking(kube, plugin) as control:
        told = control.changes()
        await anext(told)
        await until(control, Phase.UP)
        kube.token = "the next"
        plugin.gives("the next")
        kube.cut()
        before = len(kube.requests)
        async for _ in told:
            if sum(request.endswith("/deployments") for request in kube.requests[before:]) > 1:
                break
            kube.status("ml", readyReplicas=1)
        assert plugin.runs == 2


async def test_it_is_run_again_before_its_token_expires(plugin: Plugin) -> None:
    clock = [0.0]
    tokens = Tokens(None, None, plugin.command, lambda: clock[0])
    plugin.gives("a", "1970-01-01T00:01:00Z")
    for clock[0], runs in ((0.0, 1), (49.0, 1), (51.0, 2)):
        assert await tokens.current() == "a"
        assert plugin.runs == runs
    plugin.gives("b")
    for clock[0] in (61.0, 1e9):  # it does not say until when
        assert await tokens.current() == "b"
    assert plugin.runs == 3
