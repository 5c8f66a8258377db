"""Whether workers and readers fit on a Ray; and that a run on too small a Ray is refused, not left waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray._private.label_utils import validate_label_key, validate_label_selector_value

from rayrec.train import ConfigError, ResourceError, TrainError, parse_config
from rayrec.train.config.node_labels import is_label_condition, is_label_key, parse_size
from rayrec.train.driver.cluster import unshared_folder
from rayrec.train.driver.elastic import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    SETTLED_S,
    Growth,
    without_read_reservations,
)
from rayrec.train.driver.resources import (
    Demand,
    Node,
    Supply,
    capacity,
    demand_of,
    fits_labels,
    missing_resources,
    one_worker_per_gpu,
    refuse_if_short,
    room_for,
)
from tests.train.small import config_of, raw_config


def need_of(supply: Supply, reads_on_ray: bool = True, **trainer: object) -> Demand:
    read = {"reader": "ray" if reads_on_ray else "local", "cpus_per_read": 0.25}
    changes = {"trainer__batch_size": 64} | {f"trainer__{name}": value for name, value in trainer.items()}
    return demand_of(parse_config(raw_config(Path("/nowhere"), data__read=read, **changes)), supply)


@pytest.mark.parametrize(
    ("cpus", "workers", "share"), [(2, 1, 1.0), (2, 2, 0.5), (2, 4, 0.25), (4, 2, 1.0), (64, 2, 1.0), (2, 8, 0.25)]
)
def test_workers_leave_half_of_the_cpus_for_reading(cpus: float, workers: int, share: float) -> None:
    assert need_of(Supply(cpus=cpus, gpus=0), num_workers=workers).cpus_per_worker == share


def test_gpus_are_used_where_there_are_any() -> None:
    assert need_of(Supply(cpus=8, gpus=2), num_workers=2).use_gpu
    few = Supply(cpus=8, gpus=1)
    with pytest.raises(ResourceError, match=r"needs 2 GPUs .* lower trainer\.num_workers to 1, or"):
        refuse_if_short(need_of(few, num_workers=2), few, "the cluster has")
    assert not need_of(Supply(cpus=8, gpus=2), num_workers=2, use_gpu=False).use_gpu
    assert not need_of(Supply(cpus=8, gpus=0), num_workers=2).use_gpu
    assert not need_of(Supply(cpus=8, gpus=2), num_workers=0).use_gpu


@pytest.mark.parametrize(
    ("cpus", "gpus", "workers", "times"), [(96, 8, 8, 1), (96, 8, 2, 4), (2.5, 8, 1, 2), (96, 0, 4, 22), (1, 0, 2, 1)]
)
def test_concurrent_trials_are_limited_by_cpus_and_gpus(cpus: float, gpus: float, workers: int, times: int) -> None:
    supply = Supply(cpus=cpus, gpus=gpus)
    assert need_of(supply, num_workers=workers).times_in(supply) == times


def test_a_cluster_without_gpus_is_not_an_advice_to_train_without_workers() -> None:
    none = Supply(cpus=8, gpus=0)
    with pytest.raises(ResourceError, match=r"but the cluster has 0; set trainer\.use_gpu=false"):
        refuse_if_short(need_of(none, num_workers=2, use_gpu=True), none, "the cluster has")


@pytest.mark.parametrize(
    ("changes", "gpus", "workers"),
    [
        ({}, 1, 1),
        ({}, 0, 4),
        ({}, 4, 4),
        ({}, 8, 4),
        ({"sharding": {"replicas": "auto"}}, 2, 2),
        ({"trainer__use_gpu": False}, 1, 4),
        ({"trainer__use_gpu": True}, 1, 4),
        ({"sharding": {"replicas": 2}}, 1, 4),
        ({"sharding": {"plan": "plan.json"}}, 1, 4),
        ({"trainer__num_workers": [4, 8]}, 1, [4, 8]),
    ],
)
def test_a_machine_with_few_gpus_trains_on_them(changes: dict[str, Any], gpus: int, workers: int | list[int]) -> None:
    config = parse_config(raw_config(Path("/nowhere"), **{"trainer__num_workers": 4, **changes}))
    assert one_worker_per_gpu(config, Supply(cpus=8, gpus=gpus)).trainer.num_workers == workers


@settings(max_examples=50)
@given(cpus=st.integers(1, 64), workers=st.integers(1, 64))
def test_what_auto_asks_for_fits_or_is_refused_by_name(cpus: int, workers: int) -> None:
    supply = Supply(cpus=cpus, gpus=0)
    need = need_of(supply, num_workers=workers)
    assert 0.25 <= need.cpus_per_worker <= 1.0
    if workers * 0.25 + 0.25 <= cpus:
        refuse_if_short(need, supply, "x has")
    else:
        with pytest.raises(ResourceError, match=r"trainer\.num_workers"):
            refuse_if_short(need, supply, "x has")


def test_readers_take_what_a_read_takes_and_nothing_of_an_elastic_run() -> None:
    def reader_cpus(workers: int | list[int], cpus_per_read: float, reader: str = "ray") -> float:
        read = {"reader": reader, "cpus_per_read": cpus_per_read}
        return demand_of(config_of(trainer__num_workers=workers, data__read=read), Supply(cpus=8, gpus=0)).reader_cpus

    assert [reader_cpus(2, cpus) for cpus in (0.0, 0.25, 2.0)] == [0.25, 0.25, 2.0]
    assert reader_cpus(2, 2.0, reader="local") == reader_cpus([1, 2], 2.0) == 0.0
    assert demand_of(config_of(trainer__num_workers=2), Supply(cpus=8, gpus=2)).reader_cpus == 0.0  # reads by itself
    on_ray = config_of(trainer__num_workers=2, data__read={"reader": "ray", "cpus_per_read": 0.5})
    found = demand_of(on_ray, Supply(cpus=8, gpus=2))
    assert (found.reader_cpus, found.use_gpu, found.num_workers) == (0.5, True, 2)
    assert without_read_reservations(on_ray).data.read.cpus_per_read == 0.0
    assert not demand_of(config_of(trainer__num_workers=0), Supply(cpus=1, gpus=0)).use_gpu


@pytest.mark.parametrize(
    ("need", "supply", "text"),
    [
        (
            (4, 1.0, False, 0.5),
            (2.5, 0),
            "the run needs 4.5 CPUs (4 workers × 1 and 0.5 for reading), but x has 2.5; lower trainer.num_workers to "
            "2, or lower trainer.cpus_per_worker to at most 0.5, or use a larger cluster",
        ),
        (
            (2, 2.0, False, 0.0),
            (1.0, 0),
            "the run needs 4 CPUs (2 workers × 2), but x has 1; lower trainer.cpus_per_worker to at most 0.5, or use a "
            "larger cluster",
        ),
        (
            (1, 1.0, False, 1.0),
            (1.0, 0),
            "the run needs 2 CPUs (1 workers × 1 and 1 for reading), but x has 1; use a larger cluster",
        ),
        (
            (2, 2.0, True, 0.0),
            (1.0, 1.0),
            "trainer.num_workers=2 with use_gpu needs 2 GPUs (one per worker), but x has 1; lower trainer.num_workers "
            "to 1, or set trainer.use_gpu=false",
        ),
    ],
)
def test_a_refusal_says_what_would_fit(need: Any, supply: Any, text: str) -> None:
    workers, cpus, gpu, reading = need
    wanted = Demand(num_workers=workers, cpus_per_worker=cpus, use_gpu=gpu, reader_cpus=reading)
    with pytest.raises(ResourceError) as caught:
        refuse_if_short(wanted, Supply(cpus=supply[0], gpus=supply[1]), "x has")
    assert str(caught.value) == text


NEED = Demand(num_workers=3, cpus_per_worker=1.0, use_gpu=True, reader_cpus=0.0)


TEXTS = st.text(alphabet="aB9-_./!(), in", max_size=12)


def selection_of(**resources: Any) -> Any:
    raw = raw_config(Path("/nowhere"), trainer__num_workers=1, trainer__resources=resources)
    return parse_config(raw).trainer.resources


@settings(max_examples=300)
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
    assert is_label_key(key) and selection_of(label_selector={key: "x"}).label_selector == {key: "x"}


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
    assert parse_size(value) == size and selection_of(memory=value).memory == size


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
        selection_of(**resources)


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
        need = replace(NEED, selection=selection_of(**selection))
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


@pytest.mark.parametrize("wrong", [[2], [0, 2], [3, 2], [1, 2, 3]])
def test_least_and_most_are_checked(wrong: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_workers"):
        parse_config(raw_config(Path("/nowhere"), trainer__num_workers=wrong))


def test_the_batch_is_dealt_to_the_most_workers() -> None:
    with pytest.raises(ConfigError, match="64 rows a step cannot be dealt to 65 workers"):
        parse_config(raw_config(Path("/nowhere"), trainer__num_workers=[1, 65]))
    trainer = parse_config(raw_config(Path("/nowhere"), trainer__num_workers=[1, 64])).trainer
    assert (trainer.least_workers, trainer.most_workers, trainer.elastic) == (1, 64, True)


@given(
    st.lists(st.fixed_dictionaries({"CPU": st.integers(0, 9), "GPU": st.integers(0, 3)}), max_size=5),
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.booleans(),
)
def test_room_is_counted_node_by_node(nodes: list[dict[str, int]], cpus: float, gpus: bool) -> None:
    each = {"CPU": cpus, **({"GPU": 1.0} if gpus else {})}
    placed = 0
    for node in nodes:
        free = dict(node)
        while all(free[name] >= amount for name, amount in each.items()):
            free = {name: free[name] - each.get(name, 0) for name in free}
            placed += 1
    assert room_for(each, nodes, 10_000) == placed
    assert room_for(each, nodes, 2) == min(2, placed)


class Running(NamedTuple):
    """An attempt, by its number and workers."""

    attempt: int
    world_size: int


def test_growth_is_asked_for_once_an_attempt_and_more_rarely_where_it_brought_none() -> None:
    growth = Growth()
    assert not growth.due(Running(0, 0), 4, "ab", 1e9), "before the workers have begun"
    assert not growth.due(Running(1, 2), 4, "ab", 1.0)
    assert not growth.due(Running(1, 2), 4, "ab", FIRST_WAIT_S), "both nodes were there when it began"
    assert not growth.due(Running(1, 2), 2, "ab", 100.0), "there is no more room"
    assert growth.due(Running(1, 2), 4, "ab", 1.0 + FIRST_WAIT_S)
    assert not growth.due(Running(1, 2), 4, "ab", 102.0), "asked already"
    assert not growth.due(Running(2, 2), 4, "ab", 110.0)
    assert growth.wait_s == 2 * FIRST_WAIT_S, "the new attempt is as small as the one before"
    assert not growth.due(Running(2, 2), 4, "ab", 110.0 + FIRST_WAIT_S)
    assert growth.due(Running(2, 2), 4, "ab", 110.0 + 2 * FIRST_WAIT_S)
    assert not growth.due(Running(3, 4), 4, "ab", 400.0)
    assert growth.wait_s == FIRST_WAIT_S
    for attempt in range(4, 40):
        growth.due(Running(attempt, 1), 4, "ab", 1e6 * attempt)
        assert growth.due(Running(attempt, 1), 4, "ab", 1e6 * attempt + LONGEST_WAIT_S)
    assert growth.wait_s == LONGEST_WAIT_S


def test_nodes_that_come_together_are_one_growth() -> None:
    growth = Growth()
    assert not growth.due(Running(1, 1), 2, "ab", 10.0)
    assert not growth.due(Running(1, 1), 2, "ab", 20.0)
    assert not growth.due(Running(1, 1), 2, "abc", 21.0), "others may come with it"
    assert growth.due(Running(1, 1), 2, "ac", 21.0 + SETTLED_S), "b is told dead, c is new"
    assert not growth.due(Running(2, 2), 2, "ac", 50.0)
    late = 50.0 + FIRST_WAIT_S
    assert not growth.due(Running(2, 2), 3, "ac", late - 1.0)
    assert not growth.due(Running(2, 2), 3, "acd", late), "d has only come, however long it was waited"
    assert growth.due(Running(2, 2), 3, "acd", late + SETTLED_S)


def nodes_of(number: int) -> list[Node]:
    """Free nodes of one CPU."""
    return [Node(id=f"node{i}", resources={"CPU": 1.0}, free={"CPU": 1.0}) for i in range(number)]


def test_what_is_missing() -> None:
    need = replace(NEED, num_workers=2, use_gpu=False)
    wanted = "2 workers need 1 CPU each"
    assert missing_resources(need, nodes_of(1)) == f"{wanted}; the cluster has 1 node with room for 1"
    busy = [*nodes_of(1), replace(nodes_of(1)[0], free={"CPU": 0.5})]
    assert missing_resources(need, busy) == f"{wanted}; 1.5 CPUs and 0 GPUs of the cluster are free, with room for 1"
    assert missing_resources(need, nodes_of(2)) is None
    reading = replace(need, reader_cpus=0.5)
    assert missing_resources(reading, nodes_of(2)) is None
    assert missing_resources(reading, nodes_of(2), readers=True) == (
        f"{wanted}, and reading 0.5 CPUs; 2 CPUs and 0 GPUs of the cluster are free, with room for 2"
    )
    resources = {"CPU": 8.0, "GPU": 2.0}
    nodes = [Node(id="a", resources=resources, free=resources)]
    assert (missing_resources(NEED, nodes) or "").startswith("3 workers need 1 GPU each")


def test_the_limit_is_a_time() -> None:
    assert parse_config(raw_config(Path("/nowhere"))).trainer.wait_for_room_s is None
    with pytest.raises(ConfigError, match=r"trainer\.wait_for_room_s"):
        parse_config(raw_config(Path("/nowhere"), trainer__wait_for_room_s=-1))
