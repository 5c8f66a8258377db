"""Converts a service's config to the input of `serve deploy`, and to a KubeRay RayService."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from rayrec.inference.artifact import INDEX, ExportIndex
from rayrec.inference.export_store import ExportStore
from rayrec.serve.config import ServeConfig
from rayrec.serve.on_ray import environment, http_options

_PROCESSES_GIB = 2  # Ray, a replica's Python and torch (0.4 GiB measured), and requests within the default limits
_HEAD_GIB, _UNKNOWN_GIB = 4, 4


def deploy_config(config: ServeConfig) -> dict[str, Any]:
    """The config for `serve deploy`. Every machine of the cluster must start Ray with `environment(config)`."""
    return {
        "proxy_location": "EveryNode",
        "http_options": http_options(config),
        "applications": [
            {
                "name": config.name,
                "route_prefix": config.route,
                "import_path": "rayrec.serve.on_ray:built",
                "args": config.model_dump(mode="json", exclude_defaults=True),
            }
        ],
    }


def deploy_text(config: ServeConfig) -> str:
    """The config for `serve deploy` as YAML; its first line has the command that starts Ray."""
    variables = " ".join(f"{name}={value}" for name, value in environment(config).items())
    head = f"# Start Ray on every machine with: {variables} ray start …\n"
    return head + yaml.safe_dump(deploy_config(config), sort_keys=False)


def ray_service(config: ServeConfig, image: str, volumes: list[tuple[str, str]], exports: Sequence[Path] = ()) -> str:
    """A RayService as YAML. KubeRay runs the cluster and the application, and upgrades them without downtime.

    Args:
        image: An image with rayrec[serve] of this version.
        volumes: (claim or secret:NAME, folder) to mount in all pods: models, tokens, certificates.
        exports: Local copies of the models' exports, for the memory of a pod.

    Raises:
        ExportError: As `worker_gib`.
    """
    memory_gib = worker_gib(exports) if exports else _UNKNOWN_GIB
    mounts = [
        (f"volume-{number}", {"secret": {"secretName": source.removeprefix("secret:")}}, folder)
        if source.startswith("secret:")
        else (f"volume-{number}", {"persistentVolumeClaim": {"claimName": source}}, folder)
        for number, (source, folder) in enumerate(volumes)
    ]
    workers = {
        "groupName": "replicas",
        "replicas": config.min_replicas,
        "minReplicas": config.min_replicas,
        "maxReplicas": config.max_replicas,
        "rayStartParams": {"metrics-export-port": "8080"},
        "template": _pod(config, "ray-worker", image, mounts, config.cpus, memory_gib),
    }
    head = {
        "rayStartParams": {"num-cpus": "0", "metrics-export-port": "8080"},
        "template": _pod(config, "ray-head", image, mounts, 1, _HEAD_GIB),
    }
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": config.name.lower().replace("_", "-").replace(".", "-")},
        "spec": {
            "serveConfigV2": yaml.safe_dump(deploy_config(config), sort_keys=False),
            "rayClusterConfig": {
                "rayVersion": version("ray"),
                "enableInTreeAutoscaling": config.autoscaling is not None,
                "headGroupSpec": head,
                "workerGroupSpecs": [workers],
            },
        },
    }
    return yaml.safe_dump(service, sort_keys=False)


def worker_gib(exports: Sequence[Path]) -> int:
    """GiB of a pod with one replica, which holds two versions while it loads a newer one.

    Args:
        exports: The export of each model, or a folder of exports, of which the newest counts.

    Raises:
        ExportError: A folder has no export, or cannot be read.
    """
    stores = [ExportStore(path).newest() for path in exports]
    indexes = [ExportIndex.parse(folder.read(INDEX), folder.path) for folder in stores]
    total = sum(size for index in indexes for size, _ in index.files.values())
    return _PROCESSES_GIB + math.ceil(2 * total / (1 << 30))


def _pod(config: ServeConfig, name: str, image: str, mounts: list[Any], cpus: int, memory_gib: int) -> dict[str, Any]:
    resources = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
    ports = [{"containerPort": config.port, "name": "http"}, {"containerPort": 8080, "name": "metrics"}]
    if config.grpc_port is not None:
        ports.append({"containerPort": config.grpc_port, "name": "grpc"})
    container = {
        "name": name,
        "image": image,
        "env": [{"name": key, "value": value} for key, value in environment(config).items()],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": resources, "limits": dict(resources)},
        "ports": ports,
        "volumeMounts": [{"name": volume, "mountPath": folder, "readOnly": True} for volume, _, folder in mounts],
    }
    return {
        "spec": {
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
            "terminationGracePeriodSeconds": 60,  # answers the requests in progress
            "containers": [container],
            "volumes": [{"name": volume, **source} for volume, source, _ in mounts],
        }
    }
