"""A service's settings, from YAML. `rayrec.train`'s example scores with a `Service`."""

import tempfile
from pathlib import Path

from rayrec.serve import ModelSpec, ServeConfig, load_serve_config

with tempfile.TemporaryDirectory() as name:
    (Path(name) / "model").mkdir()
    file = Path(name) / "serve.yaml"
    file.write_text("models: [{path: model, name: clicks}]\nreplicas: 2\nport: 8001\n")
    config: ServeConfig = load_serve_config(file)
    assert config.port == 8001 and config.models[0].name == "clicks"
assert ModelSpec.parse("clicks=exports/clicks@0.1").share == 0.1
