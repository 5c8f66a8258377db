"""What `rayrec serve` is given wrong is told before anything is started."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import yaml

from rayrec.cli import run
from rayrec.inference import ExportError
from rayrec.serve import ClientConfig, Clients, ModelSpec, ServeConfig, TlsConfig, load_serve_config
from rayrec.serve.on_ray import built, check, environment, wait_until_free
from tests import kuberay


def client_with(token_file: Path) -> Clients:
    return Clients([ClientConfig(name="one", token_file=str(token_file))])


def test_a_token_file_must_hold_a_word(tmp_path: Path) -> None:
    for name, text in {"empty": "", "two": "a b", "odd": "gehe\u00efm"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=f"--token-file .*{name} must hold one ASCII word"):
            client_with(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be read"):
        client_with(tmp_path / "none")
    (tmp_path / "good").write_text("s3cret\n")
    assert client_with(tmp_path / "good").admit(b"Bearer s3cret")


@pytest.mark.parametrize("text", ["=exports", "a/b=exports", "a b=exports", "a=exports@0", "a=exports@x", "a=x@inf"])
def test_a_model_is_written_as_name_path_and_share(text: str) -> None:
    with pytest.raises(ValueError, match=r"name|NAME"):
        ModelSpec.parse(text)


def test_what_cannot_be_served_is_reported_before_ray_is_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    good = ModelSpec(name="ctr", path=model)
    with pytest.raises(ExportError, match="has no export"):
        check(ServeConfig(models=(good, ModelSpec(name="b", path=tmp_path / "none"))))
    damaged = shutil.copytree(model, tmp_path / "damaged")
    (damaged / "tables.bin").write_bytes(b"\x01" + (damaged / "tables.bin").read_bytes()[1:])
    with pytest.raises(ExportError, match=r"tables\.bin is damaged"):
        check(ServeConfig(models=(good, ModelSpec(name="b", path=damaged))))
    with pytest.raises(ValueError, match=r"--token-file .*none cannot be read"):
        check(ServeConfig(models=(good,), clients=(ClientConfig(name="a", token_file=str(tmp_path / "none")),)))
    with pytest.raises(ValueError, match=r"tls: .*none and .*none cannot be used"):
        none = str(tmp_path / "none")
        check(ServeConfig(models=(good,), direct=True, tls=TlsConfig(cert_file=none, key_file=none)))
    with pytest.raises(ValueError, match="--cpus 4096"):
        check(ServeConfig(models=(good,), cpus=4096))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"cannot listen on --host 127\.0\.0\.1 --port"):
            check(ServeConfig(models=(good,), port=taken.getsockname()[1]))
        port = taken.getsockname()[1]
    check(ServeConfig(models=(good,), port=port))


def test_a_service_leaves_no_variable_to_the_next(tmp_path: Path) -> None:
    """Or one that is direct would have the balancer of the one before."""
    before = set(os.environ)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert run(["serve", str(tmp_path), "--port", port]) == 1
    assert not [name for name in set(os.environ) - before if name.startswith(("RAY_SERVE_", "RAY_worker_"))]


@pytest.mark.parametrize("direct", [False, True])
def test_a_port_that_only_closed_connections_hold_is_waited_for(
    model: Path, direct: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    config = ServeConfig(models=(ModelSpec(name="ctr", path=model),), direct=direct)
    with socket.socket() as ended:  # as Ray's replicas listen: without SO_REUSEADDR
        ended.bind(("127.0.0.1", 0))
        ended.listen()
        config = config.model_copy(update={"port": ended.getsockname()[1]})
        with pytest.raises(OSError, match="in use"):
            wait_until_free(config)  # at once: a process listens there
        ended.accept()[0].close()  # of the probe
        with socket.create_connection(ended.getsockname()):
            ended.accept()[0].close()  # the service closes first, and Linux remembers its side
    assert "waiting" not in capfd.readouterr().err
    with pytest.raises(OSError, match="in use"):
        wait_until_free(config, patience_s=0.3)
    assert capfd.readouterr().err.count(f"waiting for port {config.port}") == 1


def served_by(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServeConfig:
    """The config that `rayrec serve` would start."""
    found: list[ServeConfig] = []
    monkeypatch.setattr("rayrec.cli.serve._serve", lambda config, detach: found.append(config))
    assert run(["serve", *words]) == 0
    return found[0]


CONFIG = """
name: ctr
route: /ctr
replicas: 2
models:
  - {name: ctr, path: exports, share: 0.9}
  - {name: ctr, path: exports, version: v2, share: 0.1}
limits: {queue: 16, batch_ms: 10}
clients: [{name: shop, token_file: token, requests_per_s: 50.0, models: [ctr]}]
grpc_port: 9000
"""


def test_a_file_says_all_of_a_service_and_flags_are_its_short_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG)
    config = served_by(monkeypatch, "--config", str(file), "--port", "8123")
    assert [str(spec.folder) for spec in config.models] == [str(tmp_path / name) for name in ("exports", "exports/v2")]
    assert (config.port, config.limits.queue, config.limits.rows) == (8123, 16, 10_000)
    assert config.clients[0].token_file == str(tmp_path / "token")
    assert ServeConfig.model_validate(config.model_dump(mode="json")) == config
    flags = served_by(monkeypatch, "ctr=/exports", "--queue", "16", "--token-file", str(tmp_path / "token"))
    file.write_text(
        "models: [{name: ctr, path: /exports}]\nlimits: {queue: 16}\nclients: [{name: default, token_file: token}]"
    )
    assert flags == served_by(monkeypatch, "--config", str(file))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("models: []", "nothing to serve: set models, or an index"),
        ("models: [{path: a}]\nrout: /x", "rout: unknown field; did you mean 'route'"),
        ("models: [{path: a}]\nroute: ctr", "route: .*not 'ctr'"),
        ("models: [{path: a}]\nport: 70000", "port: .*64000, not 70000"),
        ("models: [{path: a}]\nhost: 0.0.0.0", "host 0.0.0.0 accepts remote connections: set `clients`"),
        ("models: [{path: a}, {path: b, shadow: true}]", "models.1: shadow versions no longer exist: remove the entry"),
        ("models: [{path: a, version: ../b}]", "name a folder below .*/a"),
        ("models: [{path: a}]\nclients: [{name: x, token_file: t, models: [b]}]", "unknown model 'b'"),
        ("models: [{path: a}]\ntls: {cert_file: c, key_file: k}", "tls needs direct: true"),
        ("[1]", "must be a mapping with the fields models, name"),
        (
            "models: [{path: a}]\nautoscaling: {max_replica: 2}",
            "has no field 'max_replica'; did you mean 'max_replicas'",
        ),
        ("models: [{path: a}]\nautoscaling: {min_replicas: 1}", "autoscaling needs `max_replicas`"),
        ("models: [{path: a}]\nautoscaling: {max_replicas: 0}", "autoscaling.max_replicas: Input should be greater"),
        ("models: [{path: a}]\nautoscaling: {min_replicas: 3, max_replicas: 2}", "max_replicas.*2.*min_replicas.*3"),
        ("models: [{path: a}]\nautoscaling: {min_replicas: 0, max_replicas: 2}", "min_replicas must be at least 1"),
        ("models: [{path: a}]\nreplicas: 3\nautoscaling: {max_replicas: 2}", "leave out `replicas`"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=error):
        load_serve_config(file)


def test_the_manifests_are_what_serve_and_kuberay_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG)
    assert run(["service", "manifest", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# Start Ray on every machine with: ") and "RAY_SERVE_ENABLE_HA_PROXY=1" in text
    given = schema.ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = given.applications
    assert (application.name, application.route_prefix) == ("ctr", "/ctr")
    assert ServeConfig.model_validate(application.args) == load_serve_config(file)
    words = ["--image", "rayrec:serve", "--mount", "models:/models", "--mount", "secret:tokens:/tokens"]
    assert run(["service", "manifest", str(file), *words]) == 0
    service = yaml.safe_load(capsys.readouterr().out)
    kuberay.check(service)
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == yaml.safe_load(text)
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    container = workers["template"]["spec"]["containers"][0]
    assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in container["env"] and workers["replicas"] == 2
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/models", "/tokens"]


def test_replicas_follow_the_load_by_ray_serves_own_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    file = tmp_path / "serve.yaml"
    scaling = {"min_replicas": 2, "max_replicas": 6, "target_ongoing_requests": 3.0}
    file.write_text(yaml.safe_dump({"models": [{"name": "ctr", "path": "exports"}], "autoscaling": scaling}))
    config = load_serve_config(file)
    assert ServeConfig.model_validate(config.model_dump(mode="json")) == config
    deployment = built(config.model_dump(mode="json"))._bound_deployment
    found = deployment._deployment_config.autoscaling_config
    assert {name: getattr(found, name) for name in scaling} == scaling
    assert run(["service", "manifest", str(file), "--image", "rayrec:serve"]) == 0
    service = yaml.safe_load(capsys.readouterr().out)
    kuberay.check(service)
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"] and (workers["minReplicas"], workers["maxReplicas"]) == (2, 6)
    given = schema.ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert given.applications[0].args["autoscaling"] == scaling


@pytest.mark.parametrize(("gib", "memory"), [(0.2, "3Gi"), (19.7, "42Gi")])
def test_the_memory_of_a_pod_follows_the_size_of_its_export(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], gib: float, memory: str
) -> None:
    """Of an index that names a larger table than there is: nothing but the index is read."""
    index = json.loads((model / "export.json").read_text())
    index["files"]["tables.bin"][0] = int(gib * (1 << 30))
    for version in ("v9", "v10"):
        (tmp_path / "exports" / version).mkdir(parents=True)
        (tmp_path / "exports" / version / "export.json").write_text(json.dumps(index))
        index["files"]["tables.bin"][0] += 1
    file = tmp_path / "serve.yaml"
    file.write_text("models: [{path: /models}]")
    words = ["--image", "rayrec:serve", "--export", str(tmp_path / "exports")]
    assert run(["service", "manifest", str(file), *words]) == 0
    cluster = yaml.safe_load(capsys.readouterr().out)["spec"]["rayClusterConfig"]
    (container,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == memory == container["resources"]["requests"]["memory"]


def test_ray_serve_reads_each_variable_of_its_environment() -> None:
    """A name that an upgrade has changed would do nothing."""
    folder = Path(pytest.importorskip("ray.serve").__file__).parents[1]
    text = "".join(file.read_text() for file in (folder / "serve" / "_private").glob("*.py"))
    for direct in (False, True):
        config = ServeConfig(models=(ModelSpec(path=Path("/exports")),), direct=direct)
        unread = [name for name in environment(config) if name.startswith("RAY_SERVE_") and f'"{name}"' not in text]
        assert not unread
