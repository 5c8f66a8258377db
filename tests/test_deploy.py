"""The container file and the manifests agree with the repository, with each other, and with what KubeRay reads."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import ray
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray._private import ray_constants
from ray.scripts.scripts import cli as ray_cli
from ray.train.v2._internal.constants import ENABLE_NCCL_HANG_DETECTOR_ENV_VAR, HANG_DETECTOR_DIRNAME

from rayrec.train import load_config
from rayrec.train.config.trainer import TrainerConfig
from tests import kuberay
from tests.forked import run_forked
from tests.movielens.test_prepare import drawn_ratings, write_source
from tests.test_readme import blocks

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted((DEPLOY / "k8s" / "overlays").iterdir())
MANIFESTS = [DEPLOY / "rayjob-movielens-cpu.yaml", *sorted((DEPLOY / "k8s" / "base").glob("*.yaml"))]
MANIFESTS.remove(DEPLOY / "k8s" / "base" / "kustomization.yaml")
# Seconds in all of deploy/: trainer.grace_s and the drain of a node, and Kubernetes' limit for a pod.
GRACE_S, PODS_S = 90, 120
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def cluster_specs() -> list[Any]:
    """(id, RayCluster spec) of every RayCluster and RayJob."""
    found = []
    for path in MANIFESTS:
        for document in documents(path):
            spec = document.get("spec", {})
            if document["kind"] in ("RayCluster", "RayJob"):
                cluster = spec["rayClusterSpec"] if document["kind"] == "RayJob" else spec
                found.append(pytest.param(cluster, id=f"{path.name}:{document['kind']}"))
    return found


@cache
def built(overlay: Path) -> tuple[dict[str, Any], ...]:
    """An overlay's documents."""
    if shutil.which("kubectl") is None:
        pytest.skip("overlays are built with `kubectl kustomize`")
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_objects_with_names(path: Path) -> None:
    for document in documents(path):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
        if document["kind"].startswith("Ray"):
            assert document["apiVersion"] == "ray.io/v1"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_fields_that_kubernetes_and_kuberay_read(path: Path) -> None:
    for document in documents(path):
        kuberay.check(document)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("spec.backofLimit", 1, "'backofLimit' was unexpected"),
        ("spec.backoffLimit", "3", "'3' is not of type 'integer'"),
        ("spec.rayClusterSpec.authOptions.mode", "tokens", "'tokens' is not one of"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0, "0 is not of type 'string'"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.restart", "Never", "'restart' was unexpected"),
    ],
)
def test_a_field_that_nobody_reads_is_noticed(at: str, value: object, message: str) -> None:
    (job,) = documents(DEPLOY / "rayjob-movielens-cpu.yaml")
    *above, last = at.split(".")
    place = job
    for name in above:
        place = place[name]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError, match=re.escape(message)):
        kuberay.check(job)


def test_there_is_a_job_and_a_cluster() -> None:
    assert {d["kind"] for path in MANIFESTS for d in documents(path)} >= {
        "RayJob",
        "RayCluster",
        "PersistentVolumeClaim",
    }


@pytest.mark.parametrize("cluster", cluster_specs())
def test_clusters_are_complete(cluster: dict[str, Any]) -> None:
    assert cluster["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"] and "rayStartParams" in group
    params = [cluster["headGroupSpec"]["rayStartParams"], *(g["rayStartParams"] for g in cluster["workerGroupSpecs"])]
    assert all(isinstance(value, str) for param in params for value in param.values()), "ray start takes strings"
    images = {container["image"] for pod in pods(cluster) for container in pod["containers"]}
    assert len(images) == 1, "head and workers must run the same image"


@pytest.mark.parametrize("cluster", cluster_specs())
def test_who_has_no_token_is_refused_and_nobody_is_root(cluster: dict[str, Any]) -> None:
    """KubeRay 1.5.1 and later make the token; Ray 2.52 and later ask for it."""
    assert cluster["authOptions"] == {"mode": "token"}
    for pod in pods(cluster):
        assert pod["securityContext"]["runAsNonRoot"] is True
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert group["template"]["metadata"]["labels"] == {"app.kubernetes.io/part-of": "rayrec"}


@pytest.mark.parametrize("cluster", cluster_specs())
def test_pods_that_are_deleted_drain_for_a_last_checkpoint(cluster: dict[str, Any]) -> None:
    """`ray start --block` announces at SIGTERM that its node leaves, and waits for as long as this variable says."""
    assert hasattr(ray_constants, DRAIN)
    for pod in pods(cluster):
        (container,) = pod["containers"]
        assert {"name": DRAIN, "value": str(GRACE_S)} in container["env"]
        assert pod["terminationGracePeriodSeconds"] == PODS_S
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("head", "worker"):
        assert services[name]["environment"][DRAIN] == str(GRACE_S)
        assert services[name]["stop_grace_period"] == f"{PODS_S}s" and "--block" in services[name]["command"]


def test_gpu_clusters_record_hangs_of_nccl() -> None:
    """The variables are those that the installed Ray and torch read."""
    overlay = next(path for path in OVERLAYS if path.name == "gpu")
    (cluster,) = [document["spec"] for document in built(overlay) if document["kind"] == "RayCluster"]
    head, workers = (pod["containers"][0]["env"] for pod in pods(cluster))
    assert {"name": ENABLE_NCCL_HANG_DETECTOR_ENV_VAR, "value": "1"} in head
    torch_names = {each["name"] for each in workers if each["name"].startswith("TORCH_")}
    headers = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").glob("*.hpp")
    known = "".join(header.read_text() for header in headers)
    library = (Path(torch.__file__).parent / "lib/libtorch_cpu.so").read_bytes()
    assert len(torch_names) == 3
    for name in torch_names:
        assert f'"{name}"' in known or name.encode() in library, name
    text = (DEPLOY / "README.md").read_text()
    (prefix,) = [each["value"] for each in workers if each["name"] == "TORCH_FR_DUMP_TEMP_FILE"]
    assert f"{prefix}N" in text and f".ray_train/NAME/{HANG_DETECTOR_DIRNAME}/" in text
    launcher = (DEPLOY / "cluster-launcher.yaml").read_text()
    assert launcher.count(f"TORCH_FR_DUMP_TEMP_FILE={prefix} ") == 2


def test_the_launcher_refuses_machines_without_the_shared_folder(tmp_path: Path) -> None:
    """A run whose nodes do not share its folder would have no checkpoints."""
    (line,) = [
        line
        for line in yaml.safe_load((DEPLOY / "cluster-launcher.yaml").read_text())["setup_commands"]
        if "mountpoint" in line
    ]
    for folder, code in (("/proc", 0), (str(tmp_path), 1)):
        done = subprocess.run(["bash", "-c", line.replace("/shared ", f"{folder} ", 1)], capture_output=True, text=True)
        assert done.returncode == code and ("mount the shared folder" in done.stdout) == bool(code)


def test_the_pod_that_submits_a_job_may_reach_its_cluster() -> None:
    """KubeRay labels it otherwise; the network policy lets in what is labelled as part of rayrec."""
    (policy,) = documents(DEPLOY / "k8s" / "base" / "networkpolicy.yaml")
    admitted = [peer["podSelector"]["matchLabels"] for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    (job,) = documents(DEPLOY / "rayjob-movielens-cpu.yaml")
    submitter = job["spec"]["submitterPodTemplate"]
    assert submitter["metadata"]["labels"] in admitted
    assert submitter["spec"]["securityContext"]["runAsNonRoot"] is True
    assert submitter["spec"]["terminationGracePeriodSeconds"] == PODS_S


def test_a_stopped_job_has_time_for_a_last_checkpoint() -> None:
    (cluster,) = documents(DEPLOY / "k8s" / "base" / "raycluster.yaml")
    (job,) = documents(DEPLOY / "rayjob-movielens-cpu.yaml")
    waits = []
    for spec in (cluster["spec"], job["spec"]["rayClusterSpec"]):
        (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
        waits += [each["value"] for each in head["env"] if each["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["head"]
    waits.append(compose["environment"]["RAY_JOB_STOP_WAIT_TIME_S"])
    launcher = yaml.safe_load((DEPLOY / "cluster-launcher.yaml").read_text())["head_start_ray_commands"][-1]
    waits += re.findall(r"RAY_JOB_STOP_WAIT_TIME_S=(\d+)", launcher + (DEPLOY / "README.md").read_text())
    assert len(waits) == 5 and len(set(map(str, waits))) == 1
    files = [*DEPLOY.rglob("*.yaml"), DEPLOY / "README.md"]
    graces = [grace for file in files for grace in re.findall(r"trainer\.grace_s=(\d+)", file.read_text())]
    assert len(graces) == 4 and {float(grace) for grace in graces} == {GRACE_S}
    assert TrainerConfig().grace_s <= GRACE_S < float(waits[0]) < PODS_S
    text = (ROOT / "rayrec/train/FAULTS.md").read_text()
    assert f"set {PODS_S} s and {waits[0]} s" in text and f"`trainer.grace_s={GRACE_S}`" in text


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_are_whole_clusters_behind_their_network_policy(overlay: Path) -> None:
    for document in built(overlay):
        kuberay.check(document)
    kinds = {document["kind"]: document for document in built(overlay)}
    assert set(kinds) == {"RayCluster", "PersistentVolumeClaim", "NetworkPolicy"}
    cluster = kinds["RayCluster"]["spec"]
    test_clusters_are_complete(cluster)
    test_who_has_no_token_is_refused_and_nobody_is_root(cluster)
    chosen = kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert chosen.items() <= group["template"]["metadata"]["labels"].items()
    (container,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert (container["image"], gpus) == (("rayrec:cpu", None) if overlay.name == "cpu" else ("rayrec:cuda", "8"))
    assert cluster.get("enableInTreeAutoscaling", False) == (overlay.name == "spot")


def test_the_cluster_launcher_file_is_what_ray_takes() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((DEPLOY / "cluster-launcher.yaml").read_text())
    validate_config(prepare_config(config))
    starts = [config["head_start_ray_commands"], config["worker_start_ray_commands"]]
    for commands in starts:
        (start,) = [command for command in commands if "ray start" in command]
        assert start.startswith("RAY_AUTH_MODE=token ") and "dashboard-host" not in start


def test_the_compose_file_is_what_compose_takes() -> None:
    """By the Compose specification, aliases and merges resolved; a service's unknown field is an error."""
    from compose_spec import PyCompose

    whole = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    compose = PyCompose.from_yaml(yaml.safe_dump(whole))
    compose.validate()
    compose.to_spec()
    whole["services"]["worker"]["comand"] = "ray start"
    with pytest.raises(ValueError, match="comand"):
        PyCompose.from_yaml(yaml.safe_dump(whole))


def test_the_compose_file_asks_for_a_token_and_opens_loopback_alone() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in ("head", "worker"):
        environment = compose["services"][name]["environment"]
        assert environment["RAY_AUTH_MODE"] == "token" and environment["RAY_AUTH_TOKEN"].startswith(
            "${RAY_AUTH_TOKEN:?"
        )
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        used = {volume.split(":")[0] for volume in service["volumes"]}
        assert used <= set(compose["volumes"])
        assert ":latest" not in service["image"]
    assert compose["services"]["worker"]["deploy"]["replicas"] == 2


def test_a_retried_job_goes_on_where_it_stopped() -> None:
    """Every retry runs the same command: one name, one storage path, and nothing that starts over."""
    (job,) = [d for path in MANIFESTS for d in documents(path) if d["kind"] == "RayJob"]
    assert job["spec"]["backoffLimit"] > 0
    assert "--fresh" not in job["spec"]["entrypoint"] and "storage.path=/shared" in job["spec"]["entrypoint"]


@pytest.mark.parametrize("cluster", cluster_specs())
def test_pods_mount_what_they_declare(cluster: dict[str, Any]) -> None:
    claims = {d["metadata"]["name"] for p in MANIFESTS for d in documents(p) if d["kind"] == "PersistentVolumeClaim"}
    for pod in pods(cluster):
        declared = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(declared)
            assert container["resources"]["limits"] == container["resources"]["requests"]
        used = {v["persistentVolumeClaim"]["claimName"] for v in declared.values() if "persistentVolumeClaim" in v}
        assert used and used <= claims, "every pod needs the shared storage"


def test_the_job_runs_files_that_exist() -> None:
    (job,) = [d for path in MANIFESTS for d in documents(path) if d["kind"] == "RayJob"]
    bash, flag, script = shlex.split(job["spec"]["entrypoint"])
    assert (bash, flag) == ("bash", "-c")
    files = re.findall(r"\b(?:jobs|data)/[\w/]+\.(?:py|yaml)\b", script)
    assert len(files) == 3
    for file in files:
        assert (ROOT / file).is_file(), file


# Where a script that deploy/ names is run by a test.
RUN_BY = {
    "data/movielens/prepare.py": "tests/test_deploy.py",
    "jobs/train.py": "tests/train/test_job_submit.py",
    "jobs/calibrate.py": "tests/hosts/exchange.py",
    "jobs/experiments/sizing.py": "tests/test_deploy.py",
}


def test_every_script_that_is_named_is_one_that_a_test_runs() -> None:
    files = [*DEPLOY.rglob("*.yaml"), DEPLOY / "README.md", DEPLOY / "Dockerfile"]
    named = {script for file in files for script in re.findall(r"python ((?:jobs|data)/\S+\.py)", file.read_text())}
    assert named
    for script in named:
        assert Path(script).stem in (ROOT / RUN_BY[script]).read_text(), script


@pytest.mark.long
def test_the_sizing_table_is_what_its_command_prints(tmp_path: Path) -> None:
    words = ["jobs/experiments/sizing.py", "--gpu", "h100"]
    script = tmp_path / "command.py"
    script.write_text(f"import runpy, sys\nsys.argv = {words}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
    done = run_forked(script, ROOT, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout in (DEPLOY / "README.md").read_text(), f"renew the table in deploy/README.md:\n{done.stdout}"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_jobs_entrypoint_prepares_and_trains(tmp_path: Path) -> None:
    """Its own words, on few rows and on half as many workers; and again, as a retry of the job runs it."""
    (job,) = [d for path in MANIFESTS for d in documents(path) if d["kind"] == "RayJob"]
    source = write_source(tmp_path / "source", drawn_ratings())
    words = job["spec"]["entrypoint"]
    for there, here in (
        ("/home/ray/rayrec", str(ROOT)),
        ("prepare.py --out", f"prepare.py --source {source} --out"),
        ("/shared/", f"{tmp_path}/"),
        ("num_workers=4", "num_workers=2"),
    ):
        assert there in words
        words = words.replace(there, here)
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}", "PYTHONPATH": str(ROOT)}
    for expected in ("evaluation after epoch 3", "is already finished"):
        done = subprocess.run(shlex.split(words), env=own, cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "runs" / "movielens" / "result.json").read_text())["epochs"] == 3


def test_the_job_overrides_settings_that_exist() -> None:
    (job,) = [d for path in MANIFESTS for d in documents(path) if d["kind"] == "RayJob"]
    settings = re.findall(r'--set ([^\s"]+)', job["spec"]["entrypoint"])
    config = load_config(ROOT / "data/movielens/train.yaml", settings)
    assert config.trainer.num_workers == 4 and config.storage.path == "/shared/runs"


def test_the_image_copies_files_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]}
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert re.search(r"^USER ray$", text, re.MULTILINE)


def locked() -> dict[str, str]:
    """Package → version of the lock file."""
    lines = (DEPLOY / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_every_dependency_is_bounded_above_and_locked_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = locked()
    for text in [
        *project["dependencies"],
        *extras["cpu"],
        *extras["cuda"],
        *extras["avro"],
        *extras["docs"],
        *extras["dev"],
    ]:
        requirement = Requirement(text)
        assert {"<", "==", "~="} & {each.operator for each in requirement.specifier}, f"{text}: no upper bound"
        if not requirement.name.startswith("fbgemm"):  # two builds of one version, pinned by the extras
            version = pins.get(canonicalize_name(requirement.name))
            assert version and version in requirement.specifier, f"{text}: locked at {version}; run `make lock`"


def test_the_image_installs_what_is_locked() -> None:
    """`make setup` fills an environment in the same way, on each clean clone that is tested."""
    text = (DEPLOY / "Dockerfile").read_text()
    (line,) = re.findall(r"^RUN pip install (.*)$", text, re.MULTILINE)
    words = shlex.split(line)
    assert words[words.index("--constraint") + 1] == "deploy/requirements.lock" and words[-1] == ".[${EXTRA}]"
    assert "COPY deploy/requirements.lock deploy/requirements.lock" in text.splitlines()
    assert "--constraint $(LOCK)" in (ROOT / "Makefile").read_text()


def test_all_that_the_image_installs_is_at_its_locked_version() -> None:
    """Of the environment that `make setup` made under the same constraint: rayrec[cpu], and what it needs in turn."""
    pins, installed = locked(), dict[str, str]()
    waiting = [Requirement("rayrec[cpu]")]
    while waiting:
        wanted = waiting.pop()
        for requirement in map(Requirement, metadata.requires(wanted.name) or []):
            extras = ["", *wanted.extras]
            name = canonicalize_name(requirement.name)
            if name in installed or (
                requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
            ):
                continue
            installed[name] = metadata.version(name).split("+")[0]
            waiting.append(requirement)
    besides = {"setuptools", "rayrec", "fbgemm-gpu-cpu"}
    assert len(installed) > 30
    assert {name: version for name, version in installed.items() if name not in besides} == {
        name: pins.get(name) for name in installed if name not in besides
    }


def test_the_installed_package_is_whole(tmp_path: Path) -> None:
    """The tests run in the checkout; the image has what the wheel holds, made from what is copied there."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "rayrec", copy / "rayrec", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(copy)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("rayrec-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("rayrec/")}
        archive.extractall(tmp_path / "there")
    files = {path.relative_to(copy).as_posix() for path in (copy / "rayrec").rglob("*") if path.is_file()}
    assert held == {name for name in files if not name.endswith(".md")}
    code = "import rayrec, sys; from rayrec.cli import main; print(rayrec.__file__); sys.argv[1:] = ['--help']; main()"
    own = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=own, capture_output=True, text=True)
    assert told.stdout.startswith(str(tmp_path / "there")) and "train" in told.stdout, told.stderr


# -- every shell line of deploy/, in a shell whose programs write down what they were called with

PROGRAMS = ("apt-get", "chmod", "chown", "docker", "install", "kubectl", "mountpoint", "openssl", "pip", "python")
PROGRAMS += ("python3", "ray", "rm", "useradd")


def shell_scripts() -> dict[str, str]:
    """Where it stands → what a shell runs there."""
    scripts = {f"README {n}": block for n, block in enumerate(blocks("bash", DEPLOY / "README.md"))}
    launcher = yaml.safe_load((DEPLOY / "cluster-launcher.yaml").read_text())
    for name in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        scripts[name] = "export RAY_HEAD_IP=192.0.2.1\n" + "\n".join(launcher[name])
    (job,) = documents(DEPLOY / "rayjob-movielens-cpu.yaml")
    scripts["RayJob"] = job["spec"]["entrypoint"].replace("/home/ray/rayrec", str(ROOT))
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        if service["command"].startswith("ray"):
            scripts[f"compose {name}"] = service["command"]
        if "healthcheck" in service:
            scripts[f"health of {name}"] = shlex.join(service["healthcheck"]["test"][1:])
    docker = (DEPLOY / "Dockerfile").read_text()
    for n, line in enumerate(re.findall(r"^RUN ((?:.*\\\n)*.*)$", docker, re.MULTILINE)):
        scripts[f"Dockerfile {n}"] = f"EXTRA=cpu\n{line}"
    for path in (DEPLOY / "Dockerfile", DEPLOY / "compose.yaml"):  # commands in the comment at the top
        scripts[f"comment of {path.name}"] = "\n".join(re.findall(r"^#   (.*)$", path.read_text(), re.MULTILINE))
    return scripts


def calls_of(script: str, folder: Path) -> list[list[str]]:
    """Runs a script at the root of the repository, and returns what its programs were called with. They do nothing."""
    (folder / "bin").mkdir()
    (folder / "rayrec-venv").mkdir()
    (folder / "rayrec-venv" / "bin").symlink_to(folder / "bin")
    (folder / "rayrec").symlink_to(ROOT)
    recorder = f"#!/bin/bash\n{{ printf '%s\\0' \"${{0##*/}}\" \"$@\"; printf '\\n\\0'; }} >> {folder}/calls\n"
    for program in PROGRAMS:
        (folder / "bin" / program).write_text(recorder)
        (folder / "bin" / program).chmod(0o755)
    for program in ("bash", "base64"):
        (folder / "bin" / program).symlink_to(str(shutil.which(program)))
    environment = {"HOME": str(folder), "PATH": str(folder / "bin")}
    words = [str(shutil.which("bash")), "-euo", "pipefail", "-c", f"{script}\nwait"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    calls = (folder / "calls").read_text().split("\n\0")
    return [call.split("\0")[:-1] for call in calls if call]


def check_python(script: str, *words: str) -> None:
    source = (ROOT / script).read_text() + (ROOT / "rayrec/cli/options.py").read_text()
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in source, f"{script} has no option {word}"
    settings = [value for option, value in zip(words, words[1:], strict=False) if option == "--set"]
    load_config(ROOT / "data/movielens/train.yaml", settings)


def check_ray(*words: str) -> None:
    """Ray's own command line takes the words."""
    command, rest = ray_cli, list(words)
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    context = command.make_context(str(command.name), rest)
    if command.name == "submit":
        python, *arguments = context.params["entrypoint"]
        assert python == "python"
        check_python(*arguments)


def check_files(program: str, *words: str) -> None:
    """The files that pip, docker and kubectl are to read are in the repository, and extras in the project."""
    for option, value in zip(words, words[1:], strict=False):
        if option in ("-f", "-k", "-r", "--constraint") and value != "-l":
            assert (ROOT / value).exists(), f"{program} {shlex.join(words)}: no {value}"
        if option == "--build-arg":
            assert f"\nARG {value.split('=')[0]}" in (DEPLOY / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if program == "pip" and words[0] == "install" and (extra := re.search(r"(.*)\[(\w+)\]$", words[-1])):
        assert (ROOT / extra[1] / "pyproject.toml").is_file(), f"no project in {extra[1]}"
        assert extra[2] in project["optional-dependencies"]


@pytest.mark.parametrize("name", shell_scripts())
def test_each_shell_line_is_what_its_programs_take(name: str, tmp_path: Path) -> None:
    calls = calls_of(shell_scripts()[name], tmp_path)
    assert calls
    for program, *words in calls:
        if program == "ray":
            check_ray(*words)
        elif program == "python":
            check_python(*words)
        else:
            check_files(program, *words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ray start --heed", "No such option"),
        ("ray job submit --address http://127.0.0.1 -- python jobs/train.py --conf x", "no option --conf"),
        ("python jobs/trian.py --config x", "No such file"),
        ("python jobs/train.py --config x --set trainer.grace=9", "grace"),
        ("pip install -e '~/rayrec[cpu]'", "no project in ~/rayrec"),
        ("kubectl apply -f deploy/rayjob.yaml", "no deploy/rayjob.yaml"),
        ("docker built && false", "docker built"),
    ],
)
def test_a_wrong_line_is_noticed(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, OSError, ValueError, click.UsageError), match=re.escape(message)):
        for program, *words in calls_of(line, tmp_path):
            {"ray": check_ray, "python": check_python}.get(program, partial(check_files, program))(*words)
