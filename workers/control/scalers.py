"""Who might scale a Deployment besides us, in words: autoscalers, and whoever applies it from a repository.

Invariant: only looks; what may not be listed, or is not installed, is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from swapper.errors import BackendError
from workers.control.kube import Kube, fields_of, objects

_ARGO = "argocd.argoproj.io/tracking-id"
_FLUX = ("kustomize.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/name")


async def suspects(
    kube: Kube, namespace: str, deployment: str, found: Mapping[str, Any], *, steady: bool = False
) -> str:
    """Each with what keeps it from doing so; of nobody found: who wrote `replicas` last, "" where `steady`."""
    autoscalers = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    said = [
        f"the HorizontalPodAutoscaler {name} (it rests at 0 replicas, unless its own minReplicas is 0)"
        for name in (() if steady else await _aimed(kube, autoscalers, deployment))
    ]
    said += [
        f"the KEDA ScaledObject {name} (annotate it autoscaling.keda.sh/paused-replicas while swapper has the card)"
        for name in await _aimed(kube, f"/apis/keda.sh/v1alpha1/namespaces/{namespace}/scaledobjects", deployment)
    ]
    meta = cast("Mapping[str, Any]", found["metadata"])
    annotations, labels = fields_of(meta.get("annotations")), fields_of(meta.get("labels"))
    if _ARGO in annotations:
        said.append("Argo CD with selfHeal (ignoreDifferences /spec/replicas and RespectIgnoreDifferences=true)")
    if any(key in labels for key in _FLUX):
        said.append("Flux (leave spec.replicas out of its manifest)")
    if said or steady:
        return "; ".join(said)
    return _last(meta) or "nobody known here"


async def _aimed(kube: Kube, path: str, deployment: str) -> Sequence[str]:
    try:
        listed = await kube.get(path)
    except BackendError:
        return ()
    aims = (
        (str(one["metadata"]["name"]), fields_of(one["spec"].get("scaleTargetRef")))
        for one in objects(listed.get("items"))
    )
    kind = "Deployment"
    return [name for name, aim in aims if aim.get("name") == deployment and aim.get("kind", kind) == kind]


def _last(meta: Mapping[str, Any]) -> str:
    """Who of those that own `spec.replicas` wrote last, as the API server keeps it."""
    owners = [
        one
        for one in objects(meta.get("managedFields"))
        if "f:replicas" in fields_of(fields_of(one.get("fieldsV1")).get("f:spec")) and one.get("manager") != "swapper"
    ]
    last = max(owners, key=lambda one: str(one.get("time", "")), default=None)
    return f"{last['manager']} wrote replicas last" if last is not None else ""
