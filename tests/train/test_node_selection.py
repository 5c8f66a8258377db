"""`trainer.resources`: labels and sizes as Ray takes them, and the room that nodes have under each option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray._private.label_utils import validate_label_key, validate_label_selector_value

from rayrec.train import ConfigError, TrainError, parse_config
from rayrec.train.config.node_labels import is_label_condition, is_label_key, parse_size
from rayrec.train.config.trainer import ResourcesConfig
from rayrec.train.driver.cluster import unshared_folder
from rayrec.train.driver.resources import Demand, Node, capacity, fits_labels, missing_resources, room_for
from tests.train.small import raw_config

NEED = Demand(num_workers=3, cpus_per_worker=1.0, use_gpu=True, reader_cpus=0.0)
TEXTS = st.text(alphabet="aB9-_./!(), in", max_size=12)


def config_of(**resources: Any) -> ResourcesConfig:
    raw = raw_config(Path("/nowhere"), trainer__num_workers=1, trainer__resources=resources)
    return parse_config(raw).trainer.resources


@settings(deadline=None, max_examples=300)
@given(TEXTS)
@example("a" * 63)
@example("a" * 64)
@example("ray.io/node-id")
@example("a" * 253 + "/b")
@example("a" * 254 + "/b")
@example("!in(spot, on-demand)")
@example("in(a,b)")
@example("in()")
def test_labels_that_are_accepted_are_accepted_by_ray(text: str) -> None:
    """Ray also takes an empty value and a list without `in`, which look like a mistake."""
    assert not is_label_key(text) or validate_label_key(text) is None
    assert not is_label_condition(text) or validate_label_selector_value(text) is None
    if text and not text.lstrip("!").startswith("("):
        assert is_label_condition(text) == (validate_label_selector_value(text) is None)


@pytest.mark.parametrize("key", ["region", "ray.io/node-group", "a.b-c/d_e", "ray.io/market-type"])
def test_names_of_labels(key: str) -> None:
    assert is_label_key(key) and config_of(label_selector={key: "x"}).label_selector == {key: "x"}


@pytest.mark.parametrize(
    ("selector", "labels", "fits"),
    [
        ({}, {}, True),
        ({"a": "x"}, {"a": "x"}, True),
        ({"a": "x"}, {"a": "y"}, False),
        ({"a": "x"}, {}, False),
        ({"a": "!x"}, {"a": "x"}, False),
        ({"a": "!x"}, {"a": "y"}, True),
        ({"a": "!x"}, {}, True),
        ({"a": "in(x, y)"}, {"a": "y"}, True),
        ({"a": "in(x,y)"}, {"a": "z"}, False),
        ({"a": "!in(x, y)"}, {"a": "y"}, False),
        ({"a": "!in(x, y)"}, {"a": "z"}, True),
        ({"a": "!in(x, y)"}, {}, True),
        ({"a": "x", "b": "y"}, {"a": "x"}, False),
    ],
)
def test_which_nodes_a_selector_takes(selector: dict[str, str], labels: dict[str, str], fits: bool) -> None:
    assert fits_labels(selector, labels) is fits


@pytest.mark.parametrize(
    ("value", "size"),
    [("64GB", 64_000_000_000), ("1.5GiB", 3 * 2**29), ("2 MiB", 2**21), (2**20, 2**20), ("1TB", 10**12)],
)
def test_sizes(value: Any, size: int) -> None:
    assert parse_size(value) == size and config_of(memory=value).memory == size


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ({"memory": 64}, "trainer.resources.memory: got 64"),
        ({"memory": "64"}, "a size, e.g. 64GB or 60GiB"),
        ({"memory": "64 bananas"}, "a size, e.g. 64GB or 60GiB"),
        ({"label_selector": {"a b": "x"}}, "'a b' is not the name of a label"),
        ({"label_selector": {"region": "in()"}}, r"region: 'in\(\)' must be a label value, !value"),
        ({"label_selector": {"region": ""}}, r"region: '' must be a label value"),
        ({"placement_strategy": "pack"}, "trainer.resources.placement_strategy: got 'pack'"),
        ({"accelerator_type": "a b"}, "trainer.resources.accelerator_type"),
        ({"acelerator_type": "H100"}, "did you mean 'accelerator_type'"),
    ],
)
def test_resources_that_cannot_be_are_refused(resources: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(**resources)


def test_a_run_without_workers_selects_no_nodes() -> None:
    raw = raw_config(Path("/nowhere"), trainer__num_workers=0, trainer__resources={"memory": "1GB"})
    with pytest.raises(ConfigError, match=r"trainer\.resources: num_workers: 0 trains in this process"):
        parse_config(raw)


NODES = [{"GPU": 2.0, "CPU": 8.0}, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 0.0, "CPU": 8.0}]


@pytest.mark.parametrize(("strategy", "room"), [("PACK", 3), ("SPREAD", 3), ("STRICT_PACK", 2), ("STRICT_SPREAD", 2)])
def test_the_room_of_each_placement_strategy(strategy: Any, room: int) -> None:
    assert room_for(NEED.per_worker, NODES, 9, strategy) == room
    assert room_for(NEED.per_worker, NODES, 1, strategy) == 1
    assert room_for(NEED.per_worker, [], 1, strategy) == 0


def test_only_suitable_nodes_are_room() -> None:
    big = {"GPU": 8.0, "CPU": 96.0, "memory": 100e9, "accelerator_type:H100": 1.0}
    nodes = [
        Node(id="a", resources=big, free=big, labels={"region": "a"}),
        Node(id="b", resources=big | {"memory": 5e9}, free=big | {"memory": 5e9}, labels={"region": "b"}),
    ]
    for selection, room in [
        ({}, 3),
        ({"memory": "40GB"}, 2),
        ({"memory": "2GB", "label_selector": {"region": "b"}}, 2),
        ({"accelerator_type": "H100"}, 3),
        ({"accelerator_type": "A100"}, 0),
        ({"label_selector": {"region": "c"}}, 0),
    ]:
        need = replace(NEED, selection=config_of(**selection))
        assert capacity(need, nodes) == room, selection
        lack = missing_resources(need, nodes)
        assert (lack is None) == (room == 3)
        assert lack is None or f"with room for {room}" in lack


def test_nodes_that_do_not_see_the_run_folder_are_named_before_workers_start() -> None:
    one = {"GPU": 2.0, "CPU": 8.0}
    nodes = [Node(id=name, resources=one, free=one, address=f"10.0.0.{name}") for name in "123"]
    assert unshared_folder("/runs/a", NEED, nodes, []) is None
    warning = unshared_folder("/runs/a", NEED, nodes, nodes[2:])
    assert warning is not None and "node 10.0.0.3 of the Ray cluster cannot see /runs/a." in warning
    with pytest.raises(TrainError, match=r"2 nodes 10\.0\.0\.2, 10\.0\.0\.3 of .* no room for 3 workers\. Set storage"):
        unshared_folder("/runs/a", NEED, nodes, nodes[1:])


@pytest.mark.parametrize("resources", [{"label_selector": {"a": "b"}}, {"placement_strategy": "STRICT_SPREAD"}])
def test_an_elastic_run_selects_nodes_only_by_their_resources(resources: dict[str, Any]) -> None:
    raw = raw_config(Path("/nowhere"), trainer__num_workers=[1, 2], trainer__resources=resources)
    with pytest.raises(ConfigError, match=r"trainer\.resources: label_selector and .* need a fixed number of workers"):
        parse_config(raw)
    parse_config(raw_config(Path("/nowhere"), trainer__num_workers=[1, 2], trainer__resources={"memory": "1GB"}))
