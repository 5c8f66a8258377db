"""Cases of the data sets. What is drawn cannot be alike; its shape, types and ranges are."""

from __future__ import annotations

from typing import Any

import torch

from tests.torchrec.case import Cases
from tests.torchrec.cases_modules import ints
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


@case("10/datasets.utils.Batch")
def batches(rec: Package) -> Any:
    sparse = rec.KeyedJaggedTensor(["a"], ints(1, 2), lengths=ints(1, 1))
    batch = rec("datasets.utils").Batch(dense_features=torch.ones(2, 1), sparse_features=sparse, labels=ints(0, 1))
    moved = batch.to(torch.device("cpu"))
    methods = [hasattr(batch, name) for name in ("record_stream", "pin_memory")]
    return [
        [moved.dense_features, moved.sparse_features, moved.labels],
        isinstance(batch, rec("streamable").Pipelineable),
        methods,
    ]


@case("10/datasets.random.RandomRecDataset")
def drawn_batches(rec: Package) -> Any:
    make = rec("datasets.random").RandomRecDataset
    data = make(
        keys=["a", "b"],
        batch_size=3,
        hash_sizes=[5, 9],
        ids_per_features=[2, 4],
        num_dense=6,
        manual_seed=1,
        num_batches=3,
    )
    batch = next(iter(data))
    sparse = batch.sparse_features
    inside = [bool((sparse[key].values() < rows).all()) for key, rows in (("a", 5), ("b", 9))]
    kinds = [str(part.dtype) for part in (batch.dense_features, batch.labels, sparse.values(), sparse.lengths())]
    between = make(["a"], 50, hash_size=4, ids_per_feature=3, min_ids_per_feature=1, manual_seed=2)
    lengths = next(iter(between)).sparse_features.lengths()
    free = next(iter(make(["a"], 100, hash_size=4, ids_per_feature=3, manual_seed=2))).sparse_features.lengths()
    return [
        [batch.dense_features.shape, batch.labels.shape, sparse.lengths().shape, sparse.keys(), kinds, inside],
        [len(data), len(list(data)), int(lengths.min()), int(lengths.max()), int(free.min()), int(free.max())],
        attempt(lambda: make(["a", "b"], 3, hash_sizes=[5], ids_per_features=[2, 4])),
    ]


@case("10/datasets.random.RandomRecDataset")
def generated_batches_come_again(rec: Package) -> Any:
    data = iter(rec("datasets.random").RandomRecDataset(["a"], 4, 100, ids_per_feature=2, num_generated_batches=2))
    first, second, third = (next(data).sparse_features.values() for _ in range(3))
    return [torch.equal(first, third), torch.equal(first, second)]


@case("10/DEFAULT_CAT_NAMES")
def criteo_names(rec: Package) -> Any:
    home = rec("datasets.criteo")
    counts = [home.CAT_FEATURE_COUNT, home.INT_FEATURE_COUNT, home.DAYS, home.TOTAL_TRAINING_SAMPLES]
    return [home.DEFAULT_CAT_NAMES, home.DEFAULT_INT_NAMES, home.DEFAULT_LABEL_NAME, home.DEFAULT_COLUMN_NAMES, counts]


@case("10/movielens_20m")
def movielens_names_and_pipes(rec: Package) -> Any:
    home = rec("datasets.utils")
    from torch.utils.data.datapipes.iter import IterableWrapper

    numbers = IterableWrapper(list(range(10)))
    parts = home.idx_split_train_val(numbers, 0.7, 1)
    shares = home.rand_split_train_val(IterableWrapper(list(range(50))), 0.8)
    train, rest = (list(share) for share in shares)
    return [
        rec("datasets.movielens").DEFAULT_RATINGS_COLUMN_NAMES,
        list(home.Limit(numbers, 3)),
        [list(part) for part in parts],
        sorted(train + rest),
    ]
