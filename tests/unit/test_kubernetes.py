"""Control `kubernetes` on an API of our own with the real one's rules: scales, pods that linger, refusals, watches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from swapper.errors import BackendDown, BackendError, BackendRefused
from tests.contract.controls import until
from tests.support.fake_kube import TOKEN, FakeKube
from workers.control import Phase
from workers.control.kube import Cluster, cluster
from workers.control.kubernetes import KEPT, KubernetesControl
from workers.onoff import OnOff

Made = Callable[..., KubernetesControl]


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    kube = await FakeKube().start()
    kube.deploy("ml")
    yield kube
    await kube.stop()


@pytest.fixture
async def made(kube: FakeKube) -> AsyncIterator[Made]:
    all_made: list[KubernetesControl] = []

    def one(deployment: str = "ml") -> KubernetesControl:
        where = Cluster(kube.url, token=TOKEN, namespace="immich")
        all_made.append(KubernetesControl("tenant", deployment, find=lambda: where))
        return all_made[-1]

    yield one
    for control in all_made:
        await control.close()


async def gone(kube: FakeKube, control: KubernetesControl) -> None:
    """Stop it, its pods ending once they are seen to terminate."""
    stopping = asyncio.ensure_future(control.stop(1_000))
    await until(control, Phase.STOPPING)
    kube.vanish("ml")
    await stopping


async def test_it_is_scaled_to_nothing_and_whoever_comes_next_scales_it_to_what_it_had(
    kube: FakeKube, made: Made
) -> None:
    kube.scale("ml", 3)
    await gone(kube, made())
    found = kube.deployments["ml"]
    assert (found["spec"]["replicas"], found["metadata"]["annotations"]) == (0, {KEPT: "3"})
    later = made()
    await later.ensure()
    assert kube.deployments["ml"]["spec"]["replicas"] == 3
    assert len((await until(later, Phase.UP)).containers) == 3


async def test_a_pod_that_terminates_is_there_whatever_the_status_says(kube: FakeKube, made: Made) -> None:
    control = made()
    stopping = asyncio.ensure_future(control.stop(1_000))
    seen = await until(control, Phase.STOPPING)
    assert (kube.deployments["ml"]["status"]["replicas"], seen.why) == (
        0,
        "ml-1 of the Deployment immich/ml is terminating",
    )
    assert not stopping.done()
    kube.vanish("ml")
    await stopping
    assert (await control.look()).phase is Phase.GONE


async def test_pods_that_do_not_end_are_named(kube: FakeKube, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.control.kubernetes._LEAVE_S", 0.05)
    kube.pods["ml-1"]["spec"]["terminationGracePeriodSeconds"] = 0
    said = "the Deployment immich/ml was scaled to 0 and after 0.05 s these pods are still there: ml-1; kubectl"
    with pytest.raises(BackendError, match=said):
        await made().stop(0)


async def test_it_is_up_once_what_is_wanted_is_ready_in_the_generation_of_now(kube: FakeKube, made: Made) -> None:
    control = made()
    await gone(kube, control)
    kube.controller = False
    await control.ensure()
    assert (await control.look()).phase is Phase.STARTING
    kube.status("ml", readyReplicas=1)
    assert (await control.look()).phase is Phase.STARTING, "those may be the ready ones of before"
    kube.status("ml", observedGeneration=kube.deployments["ml"]["metadata"]["generation"])
    assert (await control.look()).phase is Phase.UP


async def test_a_load_says_what_keeps_its_pod_from_being_ready(kube: FakeKube, made: Made) -> None:
    kube.status("ml", readyReplicas=0)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    kube.pods["ml-1"]["status"]["containerStatuses"] = [{"state": waiting}]
    control = made()
    assert (await control.look()).why == "the Deployment immich/ml: ml-1: ImagePullBackOff no such image"
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    kube.brisk = True
    kube.status("ml", conditions=[late])
    with pytest.raises(BackendError, match=r"tenant was started and does not work: .* ImagePullBackOff no such image"):
        await OnOff("tenant", control, grace_ms=1).load("tenant")
    assert (await control.look()).phase is Phase.GONE, "what did not come up does not stay"


async def test_a_write_of_somebody_else_between_a_look_and_a_change_is_no_failure(kube: FakeKube, made: Made) -> None:
    kube.conflicts = 2
    await gone(kube, made())
    assert kube.deployments["ml"]["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("verb", "subject", "said"),
    [
        ("patch", "deployments", "swapper may not change the Deployment immich/ml: give its account a Role with that"),
        ("patch", "deployments/scale", "swapper may not scale the Deployment immich/ml: .*cannot patch resource"),
        ("list", "pods", "swapper may not list the pods of the Deployment immich/ml"),
    ],
)
async def test_what_the_account_may_not_is_told_and_nothing_counts_as_gone(
    kube: FakeKube, made: Made, verb: str, subject: str, said: str
) -> None:
    kube.denied = {(verb, subject)}
    control = made()
    with pytest.raises(BackendRefused, match=said):
        await control.stop()
    assert (await control.look()).phase in (Phase.UP, Phase.UNREACHABLE)
    [problem] = await control.problems()
    assert f"swapper may not {verb} {subject} in immich" in problem


async def test_a_deployment_that_is_not_there_is_a_sentence(kube: FakeKube, made: Made) -> None:
    control = made("mm")
    said = "there is no Deployment immich/mm: apply it, or correct namespace: and deployment:"
    seen = await control.look()
    assert (seen.phase, seen.why) == (Phase.MISSING, said)
    await control.stop()
    with pytest.raises(BackendRefused, match=said):
        await control.ensure()
    assert await control.problems() == [said]


@pytest.mark.parametrize(
    ("place", "kind", "said"),
    [
        ("autoscaling/v2/namespaces/immich/horizontalpodautoscalers", "Deployment", "the HorizontalPodAutoscaler busy"),
        ("keda.sh/v1alpha1/namespaces/immich/scaledobjects", None, "the KEDA ScaledObject busy (annotate it"),
    ],
)
async def test_who_scales_it_back_is_named(kube: FakeKube, made: Made, place: str, kind: str | None, said: str) -> None:
    aim = {"name": "ml"} | ({"kind": kind} if kind else {})
    other = {"metadata": {"name": "other"}, "spec": {"scaleTargetRef": {"name": "nobody"}}}
    kube.extra[f"/apis/{place}"] = [other, {"metadata": {"name": "busy"}, "spec": {"scaleTargetRef": aim}}]
    control = made()
    backend = OnOff("tenant", control, grace_ms=1_000)
    leaving = asyncio.ensure_future(backend.release("tenant", limit_ms=1))
    await until(control, Phase.STOPPING)
    kube.vanish("ml")
    await leaving
    assert await backend.end_hung() is None
    kube.scale("ml", 1, "somebody")
    told = await backend.end_hung()
    assert told is not None
    assert told.startswith(f"tenant was started by somebody else: scaled to 1 by somebody else: {said}")


async def test_one_who_is_no_autoscaler_is_known_by_what_the_api_wrote_down(kube: FakeKube, made: Made) -> None:
    control = made()
    await gone(kube, control)
    kube.scale("ml", 2, "argocd-controller")
    assert (await control.look()).why == "scaled to 2 by somebody else: argocd-controller wrote replicas last"
    kube.deployments["ml"]["metadata"]["annotations"]["argocd.argoproj.io/tracking-id"] = "x"
    assert "Argo CD with selfHeal (ignoreDifferences /spec/replicas" in (await control.look()).why
    [problem] = await control.problems()
    assert problem.startswith("the Deployment immich/ml would be scaled back: Argo CD with selfHeal")


async def test_one_scaled_back_while_its_pods_leave_ends_the_wait(kube: FakeKube, made: Made) -> None:
    control = made()
    stopping = asyncio.ensure_future(control.stop(60_000))
    await until(control, Phase.STOPPING)
    kube.scale("ml", 1, "keda-operator")
    with pytest.raises(BackendError, match="was scaled to 0 and is at 1: keda-operator wrote replicas last"):
        await stopping


async def test_changes_are_told_through_watches_that_are_cut_and_ones_that_are_too_old(
    kube: FakeKube, made: Made
) -> None:
    control = made()
    told = control.changes()
    await anext(told)
    await until(control, Phase.UP)
    for accident in (kube.cut, kube.forget):
        accident()
        before = len(kube.requests)
        kube.status("ml", readyReplicas=0)
        async for _ in told:
            if sum(request.endswith("/deployments") for request in kube.requests[before:]) > 1:
                break  # listed anew, and watched from there
            kube.status("ml", readyReplicas=0)
        change = asyncio.ensure_future(anext(told))
        kube.status("ml", readyReplicas=1)
        await change


async def test_an_api_that_is_away_says_nothing(kube: FakeKube, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.control.kubernetes._LEAVE_S", 0.05)
    control = made()
    await kube.stop()
    seen = await control.look()
    assert (seen.phase, control.alive()) == (Phase.UNREACHABLE, None)
    assert seen.why.startswith(f"the Kubernetes API at {kube.url} does not answer: ")
    with pytest.raises(BackendDown):
        await control.stop(0)


@pytest.mark.parametrize("said", ["<html>sign in</html>", "[]", '{"type": "ADDED'])
async def test_a_stranger_that_answers_for_the_api_says_nothing_and_ends_no_watch(
    kube: FakeKube, made: Made, said: str
) -> None:
    control = made()
    told = control.changes()
    await anext(told)
    await until(control, Phase.UP)
    kube.stranger = said
    kube.cut()
    while (seen := await control.look()).phase is not Phase.UNREACHABLE:
        await anext(told)
    assert seen.why == f"who answers at {kube.url} is no Kubernetes API; what stands before it?"
    before = len(kube.requests)
    kube.stranger = ""
    async for _ in told:
        if sum(request.endswith("/deployments") for request in kube.requests[before:]) > 1:
            break  # listed anew, and watched from there
        kube.status("ml", readyReplicas=0)
    change = asyncio.ensure_future(anext(told))
    kube.status("ml", readyReplicas=1)
    await change


async def test_certificates_that_cannot_be_used_are_a_sentence(kube: FakeKube, tmp_path: Path) -> None:
    config = tmp_path / "config"
    there = "certificate-authority: nowhere.crt"
    config.write_text(
        f"""
current-context: home
contexts: [{{name: home, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "https://10.0.0.1:6443", {there}}}}}]
users: [{{name: u, user: {{token: s3cret}}}}]
"""
    )
    control = KubernetesControl("t", "ml", "immich", lambda: cluster({"KUBECONFIG": str(config)}))
    seen = await control.look()
    assert seen.phase is Phase.UNREACHABLE
    assert seen.why.startswith(f"{config}: the certificates of its cluster or user cannot be used: ")
    with pytest.raises(BackendRefused, match=r"/ca.crt cannot be used: .*; does this pod mount its account\?"):
        cluster({"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path / "account")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ({"command": "sh", "args": ["-c", "exit 3", "s3cret"]}, "sh, .* fails: it ended with 3"),
        ({"command": "sh", "args": ["-c", "echo null # s3cret"]}, "sh, .* fails: it tells no token"),
        ({"command": "no-such-program", "args": ["s3cret"]}, "no-such-program, .* fails: No such file or directory"),
        ({"args": ["s3cret"]}, "None, .* fails: No such file or directory"),
    ],
)
async def test_a_program_that_gives_no_token_is_told_without_its_arguments(
    kube: FakeKube, command: dict[str, object], why: str
) -> None:
    where = Cluster(kube.url, token="s3cret", command=command)
    control = KubernetesControl("t", "ml", "immich", lambda: where)
    seen = await control.look()
    assert re.search(why, seen.why)
    assert "s3cret" not in f"{seen.why} {where!r}"
    await control.close()


async def test_where_the_api_is_comes_from_a_kubeconfig_or_from_the_pod(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        """
current-context: home
contexts:
- {name: work, context: {cluster: w, user: w}}
- {name: home, context: {cluster: c, user: u, namespace: media}}
clusters: [{name: c, cluster: {server: "http://10.0.0.1:8001/"}}]
users: [{name: u, user: {tokenFile: token}}]
"""
    )
    found = cluster({"KUBECONFIG": str(config)})
    assert (found.server, found.namespace, found.token_file) == ("http://10.0.0.1:8001", "media", tmp_path / "token")
    with pytest.raises(BackendRefused, match="no Kubernetes is known here: there is neither"):
        cluster({"HOME": str(tmp_path)})
    config.write_text(config.read_text().replace("current-context: home", "current-context: work"))
    with pytest.raises(BackendRefused, match="there is no cluster 'w' in clusters"):
        cluster({"KUBECONFIG": str(config)})


async def test_a_token_may_come_from_the_program_that_a_kubeconfig_names(kube: FakeKube) -> None:
    script = f'echo \'{{"status": {{"token": "{TOKEN}"}}}}\''
    command = {"command": "sh", "args": ["-c", script]}
    control = KubernetesControl("t", "ml", "immich", lambda: Cluster(kube.url, command=command))
    assert (await control.look()).phase is Phase.UP
    await control.close()
    wrong = KubernetesControl("t", "ml", "immich", lambda: Cluster(kube.url, command={"command": "/no/such"}))
    assert "/no/such, which the kubeconfig names for the token, fails" in (await wrong.look()).why
    await wrong.close()
