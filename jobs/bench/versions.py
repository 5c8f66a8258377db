"""Times two checkouts of rayrec on the CPU, in turns: training steps, steps of built-in models, the data path, scoring
with an export, or requests to a service.

    git worktree add --detach /tmp/earlier 5be9ecb
    python jobs/bench/versions.py /tmp/earlier [--what steps|models|data|inference|serving|run] [--rounds 15]

Each checkout has processes that stay up; a round times every case in the one and then in the other. The ratio is the
median over rounds of this checkout's time over the other's. Both must have the public names that this file uses.

`steps`: two gloo ranks, 26 tables of 50,000 × 64 and two layers over them; forward, backward and update. `models`: one
rank, with default losses, in processor time. `data`: one process that maps 100,000 rows held in memory, and reads
manifests and epochs of Parquet files. `inference`: batches and lookups of a ranker's export that is not compiled, in
processor time. `serving`: the median time of requests over HTTP to a service of that export in another process. `run`:
`rayrec train data/movielens/train.yaml`, its wall time and the processor time of all of its processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

DATA_ROWS = 400_000
ROUND_S = 0.03
# Freed memory is kept, as training workers do. Otherwise the history of a process decides which cases pay page faults.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
TABLES, ROWS, DIM, BATCHES = 26, 50_000, 64, 4
# Name, kind of plan, mean ids of a bag, batch of a rank, steps of a round.
CASES = (
    ("table-wise, batch 1024", "table", 1, 1024, 6),
    ("column-wise, batch 1024", "column", 1, 1024, 6),
    ("row-wise, batch 1024", "row", 1, 1024, 6),
    ("table-wise, batch 16", "table", 1, 16, 60),
    ("mixed, batch 1024", "mixed", 1, 1024, 6),
    ("row-wise, batch 512, 10 ids", "row", 10, 512, 6),
    ("mixed, batch 512, 10 ids", "mixed", 10, 512, 6),
)


class Model(nn.Module):
    """Two layers over pooled vectors."""

    def __init__(self, vectors: nn.Module) -> None:
        super().__init__()
        self.vectors = vectors
        self.over = nn.Sequential(nn.Linear(TABLES * DIM, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, features: Any) -> torch.Tensor:
        mean: torch.Tensor = self.over(self.vectors(features).values()).mean()
        return mean


def model_and_batches(kind: str, ids: int, batch: int) -> tuple[nn.Module, list[Any]]:
    from rayrec.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, ShardingEnv, ShardingPlan
    from rayrec.distributed import ShardingType as Type
    from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
    from rayrec.sparse import KeyedJaggedTensor
    from tests.distributed.oracle import cut

    names = [f"f{n}" for n in range(TABLES)]
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name])
        for name in names
    ]
    kinds = {"table": [Type.TABLE_WISE], "row": [Type.ROW_WISE], "column": [Type.COLUMN_WISE]}
    chosen = kinds.get(kind) or [Type.TABLE_WISE, Type.ROW_WISE, Type.COLUMN_WISE]
    plan = {}
    for n, table in enumerate(tables):
        sharding = chosen[n % len(chosen)]
        plan[table.name] = cut(table, sharding, [n % 2] if sharding == Type.TABLE_WISE else [0, 1])
    model = DistributedModelParallel(
        Model(EmbeddingBagCollection(tables, device=torch.device("meta"))),
        ShardingEnv.from_process_group(dist.group.WORLD),
        torch.device("cpu"),
        ShardingPlan({"vectors": plan}),
        [EmbeddingBagCollectionSharder({"learning_rate": 0.1})],
    )
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = []
    for _ in range(BATCHES):
        lengths = (
            torch.randint(1, 2 * ids, (TABLES * batch,), generator=draw) if ids > 1 else torch.ones(TABLES * batch)
        )
        lengths = lengths.to(torch.int64)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
        batches.append(KeyedJaggedTensor(names, values, lengths=lengths))
    return model, batches


def serve_steps(rank: int, store: str) -> None:
    """Times the cases whose numbers rank 0 reads from its standard input."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    cases = [model_and_batches(kind, ids, batch) for _, kind, ids, batch, _ in CASES]
    for model, batches in cases:
        for batch in batches:
            model(batch).backward()
    if rank == 0:
        print(*(name for name, *_ in CASES), sep="\t", flush=True)
    while True:
        number = torch.tensor(int(sys.stdin.readline() or -1) if rank == 0 else 0)
        dist.broadcast(number, 0)
        if number < 0:
            return
        (model, batches), steps = cases[int(number)], CASES[int(number)][-1]
        dist.barrier()
        start = time.perf_counter()
        for step in range(steps):
            model(batches[step % BATCHES]).backward()
        dist.barrier()
        if rank == 0:
            print((time.perf_counter() - start) / steps, flush=True)


def write_files(folder: Path) -> None:
    """The files that both checkouts read, and the kinds of derived columns, which both must know."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from mapping import KINDS, columns

    (folder / "kinds.json").write_text(json.dumps(KINDS))
    table = columns(DATA_ROWS)
    pq.write_table(table.slice(0, DATA_ROWS // 4), folder / "rows.parquet")
    day = pa.array(np.arange(DATA_ROWS) // (DATA_ROWS // 10))
    plain = table.select(["user", "hour", "price", "label"]).append_column("day", day)
    pq.write_table(plain, folder / "plain.parquet", row_group_size=DATA_ROWS // 20)
    pq.write_table(table.select(["city", "title", "label"]), folder / "texts.parquet", row_group_size=DATA_ROWS // 4)
    pq.write_table(table.select(["tags", "others", "label"]), folder / "lists.parquet", row_group_size=DATA_ROWS // 4)
    (folder / "many").mkdir()
    for number in range(200):
        pq.write_table(plain.slice(number * 100, 100), folder / "many" / f"{number}.parquet")


def data_cases(folder: Path) -> dict[str, Callable[[], object]]:
    """What a round of `data` times, by name."""
    import pyarrow.parquet as pq

    from rayrec.data import BatchStream, Cursor, DataError, Manifest, ReadOptions, Schema, to_batch

    rows = pq.read_table(folder / "rows.parquet")
    hashed = {"mapping": {"kind": "hash"}}
    plain = Schema.model_validate(
        {"sparse": [{"name": "user", **hashed}, {"name": "hour", **hashed}], "dense": [{"name": "price"}]}
    )
    texts = Schema.model_validate({"sparse": [{"name": "city", **hashed}]})
    lists = Schema.model_validate({"sparse": [{"name": n, "kind": "id_list", **hashed} for n in ("tags", "others")]})

    def mapped(schema: Schema, table: Any, times: int = 1) -> Callable[[], object]:
        sizes = {feature.name: 1 << 20 for feature in schema.sparse}
        return lambda: [to_batch(table, schema, sizes) for _ in range(times)]

    def derived(kind: dict[str, Any]) -> Callable[[], object]:
        """The mapping of a derived column as the first kind of feature that takes its values."""
        feature = {"name": "x", "column": "made"}
        bags = [{"sparse": [feature | hashed | {"kind": of}]} for of in ("id", "id_list", "weighted_id_list")]
        for features in [*bags, {"dense": [feature | {"default": 0.0}], "sparse": [{"name": "hour", **hashed}]}]:
            with suppress(ValueError, DataError):
                act = mapped(Schema.model_validate(features | {"derived": [{"name": "made", **kind}]}), rows)
                act()
                return act
        raise SystemExit(f"no feature takes the values of {kind}")

    def epoch(file: str, schema: Schema, filters: Sequence[Any] = (), **options: Any) -> Callable[[], object]:
        sizes = {feature.name: 1 << 20 for feature in schema.sparse}
        manifest = Manifest.read(str(folder / file), schema, filters=filters)
        local = ReadOptions(reader="local")
        how: dict[str, Any] = {
            "rank": 0,
            "world_size": 1,
            "cursor": Cursor.start(0),
            "seed": 0,
            "options": local,
        } | options

        def read() -> None:
            with BatchStream(manifest, schema, sizes, batch_rows=4096, **how) as stream:
                for _ in stream:
                    pass

        return read

    cases = {
        "ids and numbers": mapped(plain, rows),
        "8 rows, 100 times": mapped(plain, rows.slice(0, 8), 100),
        "texts": mapped(texts, rows),
        "lists": mapped(lists, rows),
    }
    kinds = json.loads((folder / "kinds.json").read_text())
    cases |= {f"derived: {name}": derived(kind) for name, kind in kinds.items()}
    cases |= {
        "manifest of 200 files": lambda: Manifest.read(str(folder / "many"), plain),
        "epoch": epoch("plain.parquet", plain),
        "epoch in order": epoch("plain.parquet", plain, shuffle=False),
        "epoch of texts": epoch("texts.parquet", texts),
        "epoch of lists": epoch("lists.parquet", lists),
        "epoch, 20 % of row groups": epoch("plain.parquet", plain, [("day", ">=", 8)]),
        "epoch, 12 % of rows": epoch("plain.parquet", plain, [("hour", "<", 3)]),
        "epoch, 92 % of rows": epoch("plain.parquet", plain, [("hour", "<", 22)]),
        "epoch, 20 % of negatives": epoch("plain.parquet", plain, negative_rate=0.2),
    }
    return cases


def model_cases() -> dict[str, Callable[[], object]]:
    """Three steps of each built-in model, by name: forward, backward and updates."""
    from rayrec.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
    from rayrec.models import MODELS, Batch, TwoTower, hstu, sasrec
    from rayrec.modules import EmbeddingBagConfig, EmbeddingConfig
    from rayrec.sparse import KeyedJaggedTensor

    rows, dim, draw = 20_000, 32, torch.Generator().manual_seed(0)

    def tables_of(kind: Any, names: Sequence[str]) -> list[Any]:
        return [kind(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=[n]) for n in names]

    def case(make: Callable[..., nn.Module], names: Sequence[str], batch: int, most: int, dense: int) -> Any:
        """The first feature is a list of up to `most` ids, if `most` is above 1; the others are single ids."""
        lengths = torch.ones(len(names), batch, dtype=torch.int64)
        if most > 1:
            lengths[0] = torch.randint(2, most + 1, (batch,), generator=draw)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=draw)
        kjt = KeyedJaggedTensor(list(names), values, lengths=lengths.view(-1), stride=batch)
        label = (torch.rand(batch, generator=draw) < 0.5).float()
        item = Batch(torch.rand(batch, dense, generator=draw), kjt, label)
        settings = {"learning_rate": 0.01}
        sharders: list[Any] = [EmbeddingBagCollectionSharder(settings), EmbeddingCollectionSharder(settings)]
        model = DistributedModelParallel(make(), device=torch.device("cpu"), sharders=sharders)
        adam = torch.optim.Adam(model.dense_parameters().values(), lr=1e-3)

        def steps() -> None:
            for _ in range(3):
                adam.zero_grad()
                model(item)[0].backward()
                adam.step()

        return steps

    ids, numbers = [f"f{n}" for n in range(26)], 13
    bags = tables_of(EmbeddingBagConfig, ids)
    histories = tables_of(EmbeddingConfig, ["seen"])
    arches: dict[str, dict[str, Any]] = {
        "dlrm": {"dense_arch": [128, dim], "over_arch": [256, 128, 1]},
        "deepfm": {"deep_arch": [256, 128, 1]},
        "dcn": {"dense_arch": [128, dim], "over_arch": [256, 128, 1]},
    }
    cases = {
        f"{name}, batch {batch}": case(partial(MODELS[name], bags, numbers, **args), ids, batch, 1, numbers)
        for name, args in arches.items()
        for batch in (64, 1024)
    }
    towers = tables_of(EmbeddingConfig, ["liked", "item", "user"])
    names = ["liked", "item", "user"]
    cases["two_tower, batch 512"] = case(partial(TwoTower, towers, 2, item="item"), names, 512, 20, 2)
    for make in (sasrec, hstu):
        made = partial(make, histories, 0, history="seen", max_length=50)
        cases[f"{make.__name__}, batch 128"] = case(made, ["seen"], 128, 51, 0)
    return cases


def inference_cases(folder: Path) -> dict[str, Callable[[], object]]:
    """Scoring with an export of 26 tables, and with quantized tables alone, by name."""
    from ranker import KEYS, batch_of, trained_ranker

    from rayrec import quant
    from rayrec.inference import Model, export
    from rayrec.inference.scorer import Scorer

    rows = 10_000
    trained, source = trained_ranker(rows)
    model = Model(export(trained, folder).folder)
    scorer = Scorer(model)
    cases: dict[str, Callable[[], object]] = {}
    for size in (1, 100, 1024):
        cases[f"score, {size} rows"] = partial(model.score, batch_of(KEYS, rows, size, 1))
        columns = {name: np.arange(size).tolist() for name in KEYS}
        columns |= {f"d{n}": np.linspace(0, 1, size).tolist() for n in range(13)}
        cases[f"map and score, {size} rows"] = partial(scorer.score, columns)
    for kind in ("fp32", "int8"):
        bags = quant.EmbeddingBagCollection.from_float(source.embedding_bags, kind)
        for size, ids in ((1, 1), (100, 10)):
            cases[f"{kind} lookup, {size} rows of {ids} ids"] = partial(bags, batch_of(KEYS, rows, size, ids).sparse)
    return cases


SERVICE = (
    "import socket, sys, torch, uvicorn; from pathlib import Path; from rayrec.serve import ModelSpec, Service; "
    "from rayrec.serve.http import App; torch.set_num_threads(1); sock = socket.create_server(('127.0.0.1', 0)); "
    "print(sock.getsockname()[1], flush=True); app = App(Service([ModelSpec(name='ctr', path=Path(sys.argv[1]))])); "
    "uvicorn.Server(uvicorn.Config(app, log_level='error')).run([sock])"
)
REQUESTS = 25  # of a round


def bodies() -> dict[str, bytes]:
    """Requests of 26 ids and 13 numbers, by name."""
    ids, numbers = {f"f{n}": 100 * n for n in range(26)}, {f"d{n}": n / 7 for n in range(13)}
    row = ids | numbers
    shared = {name: row[name] for name in [*list(ids)[:13], *numbers]}

    def of_candidates(count: int) -> Any:
        return {f"f{n}": [(n + 97 * c) % 9999 for c in range(count)] for n in range(13, 26)}

    asked = {
        "one row": {"rows": [row]},
        "one row as columns": {"rows": {name: [value] for name, value in row.items()}},
        "context and 1 candidate": {"context": shared, "candidates": of_candidates(1)},
        "context and 100 candidates": {"context": shared, "candidates": of_candidates(100)},
        "100 rows": {"rows": [row] * 100},
    }
    return {name: json.dumps(one).encode() for name, one in asked.items()}


def serve_requests(folder: Path) -> None:
    """Times requests to a service of this checkout whose numbers arrive on standard input."""
    import http.client

    from ranker import trained_ranker

    from rayrec.inference import export

    exported = export(trained_ranker(10_000)[0], folder).folder
    service = subprocess.Popen([sys.executable, "-c", SERVICE, str(exported)], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    try:
        port = int(service.stdout.readline())

        def seconds(client: http.client.HTTPConnection, body: bytes) -> float:
            start = time.perf_counter()
            client.request("POST", "/score", body, {"content-type": "application/json"})
            answer = client.getresponse()
            text = answer.read()
            taken = time.perf_counter() - start
            if answer.status != 200:
                raise SystemExit(f"the service answered {answer.status}: {text[:300]!r}")
            return taken

        def median(body: bytes) -> float:
            # A connection for each round: between two, the server closes idle ones.
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
                seconds(client, body)
                return statistics.median(seconds(client, body) for _ in range(REQUESTS))

        cases = bodies()
        for body in cases.values():
            median(body)
        print(*cases, sep="\t", flush=True)
        while (number := int(sys.stdin.readline() or -1)) >= 0:
            print(median([*cases.values()][number]), flush=True)
    finally:
        service.terminate()
        service.wait()


def serve_cases(cases: dict[str, Callable[[], object]]) -> None:
    """Times the cases whose numbers arrive on standard input, in processor time of one process."""
    calls = []  # of a round: in a single short one, the caches that the other process has emptied decide
    for act in cases.values():
        act()
        calls.append(max(1, round(ROUND_S / processor_time(act, 1))))
    print(*cases, sep="\t", flush=True)
    while (number := int(sys.stdin.readline() or -1)) >= 0:
        print(processor_time(list(cases.values())[number], calls[number]), flush=True)


def processor_time(act: Callable[[], object], calls: int) -> float:
    """Mean seconds of a call."""
    start = time.process_time()
    for _ in range(calls):
        act()
    return (time.process_time() - start) / calls


def serve_runs() -> None:
    """Times whole runs. The processor time is of the run whose wall time was asked for before."""
    print("rayrec train, wall", "rayrec train, processor", sep="\t", flush=True)
    processor_s = 0.0
    while (number := int(sys.stdin.readline() or -1)) >= 0:
        if number == 0 or not processor_s:
            wall_s, processor_s = train()
        print(wall_s if number == 0 else processor_s, flush=True)


def train() -> tuple[float, float]:
    """Seconds of a run: wall time, and processor time of all of its processes, which are looked at every 0.1 s."""
    from harness import descendants

    env = {name: value for name, value in os.environ.items() if name not in (*MALLOC, "PYTHONDONTWRITEBYTECODE")}
    used: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        words = ["-m", "rayrec.cli", "train", "data/movielens/train.yaml", "--set", f"storage.path={folder}"]
        process = subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.DEVNULL)
        while process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            used |= {number: int(fields[11]) + int(fields[12]) for number, fields in descendants(os.getpid()).items()}
        wall_s = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}")
    return wall_s, sum(used.values()) / os.sysconf("SC_CLK_TCK")


class Checkout:
    """The processes that run the code of a checkout."""

    def __init__(self, folder: Path, served: list[str]) -> None:
        env = os.environ | {"PYTHONPATH": str(folder)} | MALLOC
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__, *served], cwd=folder, env=env, **pipes)
        self.cases = self._read().split("\t")
        if self.cases == [""]:
            raise SystemExit(f"{folder}: its processes did not start; see above")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def seconds(self, case: int) -> float:
        """Time of a step, or of a case of `data`."""
        self._write(case)
        return float(self._read())

    def _write(self, number: int) -> None:
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)

    def close(self) -> None:
        self._write(-1)
        self._process.wait(60)


def main() -> None:
    from harness import arguments, in_turns, machine, paired_ratio, print_json, require

    parser = arguments(__doc__)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--what", choices=["steps", "models", "data", "inference", "serving", "run"], default="steps")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", metavar="TEXT", help="time the cases whose names contain the text")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "data":
            write_files(Path(folder))
        served = ["--serve", args.what, folder]
        ours, theirs = (Checkout(path, served) for path in (Path(__file__).resolve().parents[2], args.other.resolve()))
        numbers = [number for number, name in enumerate(ours.cases) if args.only in name]
        require(numbers, f"no case contains {args.only!r}; there are {', '.join(ours.cases)}")
        times = in_turns(
            {
                f"{side} {number}": partial(checkout.seconds, number)
                for number in numbers
                for side, checkout in (("ours", ours), ("theirs", theirs))
            },
            args.rounds,
        )
        ours.close()
        theirs.close()
    ratios = {}
    for number in numbers:
        name = ours.cases[number]
        here, there = times[f"ours {number}"], times[f"theirs {number}"]
        ratios[name] = paired_ratio(here, there)
        print(f"{name:32} {statistics.median(here) * 1e3:8.2f} ms  {ratios[name]:.2f} of the other")
    print_json(args, ratios)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--serve"]:
        main()
    elif sys.argv[2] != "steps":
        torch.set_num_threads(1)
        own = Path(sys.argv[3]) / str(os.getpid())
        match sys.argv[2]:
            case "data":
                serve_cases(data_cases(Path(sys.argv[3])))
            case "models":
                serve_cases(model_cases())
            case "inference":
                serve_cases(inference_cases(own))
            case "serving":
                serve_requests(own)
            case "run":
                serve_runs()
    else:
        store = f"{sys.argv[3]}/{os.getpid()}"
        peer = mp.get_context("spawn").Process(target=serve_steps, args=(1, store))
        peer.start()
        serve_steps(0, store)
        peer.join()
