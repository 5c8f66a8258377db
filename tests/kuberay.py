"""Fields of KubeRay's RayCluster and RayJob (ray.io/v1, KubeRay 1.5 to 1.7, from its API reference), as a JSON schema.

Pod templates are validated with Kubernetes' schema. The operator would ignore unknown fields, so they are errors here.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

KUBERNETES = "1.30"

TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
ANYTHING = {"type": "object"}
MANAGED_BY = {"enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]}


def _object(required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*required], "properties": fields, "additionalProperties": False}


GROUP = {"rayStartParams": TEXTS, "template": ANYTHING, "labels": TEXTS, "resources": TEXTS}
HEAD = _object(
    ("rayStartParams", "template"),
    **GROUP,
    headService=ANYTHING,
    enableIngress=FLAG,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
)
WORKERS = _object(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    **GROUP,
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    suspend=FLAG,
    idleTimeoutSeconds=COUNT,
    scaleStrategy=ANYTHING,
)
AUTOSCALER = _object(
    (),
    resources=ANYTHING,
    image=TEXT,
    imagePullPolicy=TEXT,
    securityContext=ANYTHING,
    idleTimeoutSeconds=COUNT,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
    env={"type": "array"},
    envFrom={"type": "array"},
    volumeMounts={"type": "array"},
)
CLUSTER = _object(
    ("headGroupSpec",),
    authOptions=_object((), mode={"enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=FLAG),
    rayVersion=TEXT,
    suspend=FLAG,
    managedBy=MANAGED_BY,
    headServiceAnnotations=TEXTS,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=AUTOSCALER,
    gcsFaultToleranceOptions=ANYTHING,
    upgradeStrategy=_object((), type={"enum": ["Recreate", "None"]}),
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
JOB = _object(
    (),
    activeDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    rayClusterSpec=CLUSTER,
    submitterPodTemplate=ANYTHING,
    metadata=TEXTS,
    clusterSelector=TEXTS,
    submitterConfig=_object((), backoffLimit=COUNT),
    managedBy=MANAGED_BY,
    deletionStrategy=ANYTHING,
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    jobId=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    entrypointResources=TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    ttlSecondsAfterFinished=COUNT,
    shutdownAfterJobFinishes=FLAG,
    suspend=FLAG,
)
SERVICE = _object(("serveConfigV2", "rayClusterConfig"), serveConfigV2=TEXT, rayClusterConfig=CLUSTER)
SPECS = {"RayCluster": CLUSTER, "RayJob": JOB, "RayService": SERVICE}
CLUSTER_IN = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}


def check(document: dict[str, Any]) -> None:
    """
    Raises:
        jsonschema.ValidationError: what the API server would not take, or KubeRay would not read.
    """
    if document["kind"] not in SPECS:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    whole = _object(
        ("spec", "metadata"), apiVersion={"const": "ray.io/v1"}, kind=TEXT, metadata=ANYTHING, spec=ANYTHING
    )
    jsonschema.validate(document, whole)
    spec = document["spec"]
    jsonschema.validate(spec, SPECS[document["kind"]])
    cluster = spec[CLUSTER_IN[document["kind"]]] if document["kind"] in CLUSTER_IN else spec
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": document["metadata"]}
        kubernetes_validate.validate(named | {"template": group["template"]}, KUBERNETES, strict=True)
