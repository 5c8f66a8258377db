"""On a cluster of several nodes, a rank's rows are read on its own node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.sets import write

# A cluster of its own, in a process of its own: others of this test run have a Ray already.
CODE = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2).node_id for _ in range(2)]
ray.init(address=cluster.address, logging_level="ERROR")


@ray.remote(num_cpus=0.5)
def rank(number, folder):
    import ray.data.datasource
    from rayrec.data import BatchStream, Cursor, Manifest, ReadOptions
    from rayrec.data.stream import ray_reader
    from tests.data.sets import ROWS_OF, SCHEMA

    read = ray_reader._read

    def told(pieces, recipe):
        here = ray.get_runtime_context().get_node_id()
        for table in read(pieces, recipe):
            yield table.append_column("node", [[here] * table.num_rows])

    ray_reader._read = told
    manifest = Manifest.read(folder, SCHEMA, window_rows=100)
    where = {"batch_rows": 50, "rank": number, "world_size": 2, "cursor": Cursor.start(0), "seed": 0}
    found = {}
    import rayrec.data.stream.batch_stream as stream
    make = stream.make_batches

    def counted(tables, *rest):
        def each():
            for table in tables:
                for node in table["node"].to_pylist():
                    found[node] = found.get(node, 0) + 1
                yield table.drop_columns("node")
        return make(each(), *rest)

    stream.make_batches = counted
    with BatchStream(manifest, SCHEMA, ROWS_OF, options=ReadOptions(reader="ray"), **where) as batches:
        rows = sum(batch.rows for batch, _ in batches)
    return ray.get_runtime_context().get_node_id(), rows, found


refs = [
    rank.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(number, sys.argv[1])
    for number, node in enumerate(nodes)
]
print(json.dumps(ray.get(refs)))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
def test_rows_do_not_cross_the_network_once_more(tmp_path: Path) -> None:
    folder = write(tmp_path, [1600, 1600])
    done = subprocess.run([sys.executable, "-c", CODE, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert sum(rows for _, rows, _ in ranks) == 3200
    crossed = sum(rows for node, _, found in ranks for other, rows in found.items() if other != node)
    assert sum(sum(found.values()) for _, _, found in ranks) == 3200 and crossed <= 0.05 * 3200
