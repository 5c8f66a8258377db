"""Updates of tables against numbers worked out by hand, through the kernel of every plan.

One row of four numbers, with a gradient of four. `W` and `G` both have norm 6, and the mean square of `G` is 9.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayrec.distributed import EmbeddingBagCollectionSharder, ShardingEnv, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.device import DEVICE
from tests.distributed.oracle import cut

W, G = [1.0, 3.0, 1.0, 5.0], [1.0, -1.0, 5.0, 3.0]
TWOS, ONES = [2.0] * 4, [1.0] * 4

# what it is, fused_params, the row, its gradient in each step, the row after each
CASES: list[tuple[str, dict[str, Any], list[float], list[list[float]], list[list[float]]]] = [
    ("sgd", {}, W, [G, G], [[0.9, 3.1, 0.5, 4.7], [0.8, 3.2, 0.0, 4.4]]),
    # 1 - 0.1 (1 + 0.5 * 1) = 0.85; then 0.85 - 0.1 (1 + 0.425) = 0.7075; either mode is the same to SGD
    ("sgd, decay", {"weight_decay": 0.5}, ONES, [ONES, ONES], [[0.85] * 4, [0.7075] * 4]),
    ("sgd, decoupled", {"weight_decay": 0.5, "weight_decay_mode": "decouple"}, ONES, [ONES], [[0.85] * 4]),
    # sums of squares 4 and 4 + 12 = 16: 0.1 * 2 / 2, then 0.1 * sqrt(12) / 4
    ("adagrad", {"eps": 0.0}, TWOS, [TWOS, [12**0.5] * 4], [[1.9] * 4, [1.9 - 0.1 * 12**0.5 / 4] * 4]),
    # eps stands beside the root: 0.1 * 2 / (2 + 3)
    ("adagrad, eps", {"eps": 3.0}, TWOS, [TWOS], [[1.96] * 4]),
    # gradient 1 + 0.5 * 2 = 2, so 0.1 * 2 / (2 + 3)
    ("adagrad, decay", {"eps": 3.0, "weight_decay": 0.5}, TWOS, [ONES], [[1.96] * 4]),
    # 0.1 * 2 / (2 + 3), and 0.1 * 0.5 * 2
    (
        "adagrad, decoupled",
        {"eps": 3.0, "weight_decay": 0.5, "weight_decay_mode": "decouple"},
        TWOS,
        [TWOS],
        [[1.86] * 4],
    ),
    # the mean square is 9: every element by 0.3 / 3; then 9 + 9 = 18
    (
        "rowwise_adagrad",
        {"learning_rate": 0.3, "eps": 0.0},
        W,
        [G, G],
        [[0.9, 3.1, 0.5, 4.7], [w - 0.1 * g - 0.3 * g / 18**0.5 for w, g in zip(W, G, strict=True)]],
    ),
    ("rowwise_adagrad, eps", {"learning_rate": 0.6, "eps": 3.0}, W, [G], [[0.9, 3.1, 0.5, 4.7]]),
    # gradient [0, -4, 4, -2] + W = G
    (
        "rowwise_adagrad, decay",
        {"learning_rate": 0.3, "eps": 0.0, "weight_decay": 1.0},
        W,
        [[0.0, -4.0, 4.0, -2.0]],
        [[0.9, 3.1, 0.5, 4.7]],
    ),
    # G as above, and 0.3 * 1 * W
    (
        "rowwise_adagrad, decoupled",
        {"learning_rate": 0.3, "eps": 0.0, "weight_decay": 1.0, "weight_decay_mode": "decouple"},
        W,
        [G],
        [[0.6, 2.2, 0.2, 3.2]],
    ),
    # first moments 1 and 2.5, corrected 2 and 10/3; second 2 and 9, corrected 4 and 12
    (
        "adam",
        {"beta1": 0.5, "beta2": 0.5, "eps": 0.0},
        ONES,
        [TWOS, [4.0] * 4],
        [[0.9] * 4, [0.9 - 0.1 * (10 / 3) / 12**0.5] * 4],
    ),
    # g / (|g| + 1), whatever the betas are in the first step
    ("adam, eps", {"eps": 1.0}, W, [[1.0, -1.0, 3.0, 4.0]], [[0.95, 3.05, 0.925, 4.92]]),
    # decoupled is Adam's own: 0.1 * 0.5 and 0.1 * 2 * 1
    ("adam, decay", {"eps": 1.0, "weight_decay": 2.0}, ONES, [ONES], [[0.75] * 4]),
    # gradient 1 + 2 * 1 = 3, so 0.1 * 3/4
    ("adam, L2", {"eps": 1.0, "weight_decay": 2.0, "weight_decay_mode": "l2"}, ONES, [ONES], [[0.925] * 4]),
    # a root of 3 for the whole row
    ("partial_rowwise_adam", {"learning_rate": 0.3, "eps": 0.0}, W, [G], [[0.9, 3.1, 0.5, 4.7]]),
    (
        "partial_rowwise_adam, decay",
        {"learning_rate": 0.6, "eps": 3.0, "weight_decay": 0.5},
        W,
        [G],
        [[0.9 - 0.3, 3.1 - 0.9, 0.5 - 0.3, 4.7 - 1.5]],
    ),
    # direction = sign of g with norm 2, norm of W 6, ratio 3
    ("lamb", {"eps": 0.0}, W, [[1.0, -2.0, 3.0, 4.0]], [[0.7, 3.3, 0.7, 4.7]]),
    # directions 1 and 1 once more (2 / 1, then 2 / 2): ratios 2 and 1.8
    ("lamb, twice", {"beta1": 0.5, "beta2": 0.5, "eps": 0.0}, TWOS, [TWOS, TWOS], [[1.8] * 4, [1.62] * 4]),
    # first moments 1 and 0.5 - 0.5 = 0: a direction of 0 moves nothing
    (
        "lamb, at rest",
        {"beta1": 0.5, "beta2": 0.5, "eps": 0.0},
        TWOS,
        [TWOS, [-1.0] * 4],
        [[1.8] * 4, [1.8] * 4],
    ),
    # g / (|g| + 1) = -0.5, and 0.5 * 2: the direction 0.5 has norm 1, the row 4
    ("lamb, decay", {"eps": 1.0, "weight_decay": 0.5}, TWOS, [[-1.0] * 4], [[1.8] * 4]),
    # direction G / 3 with norm 2, ratio 3
    ("partial_rowwise_lamb", {"eps": 0.0}, W, [G], [[0.9, 3.1, 0.5, 4.7]]),
    # direction G / (3 + 3) has norm 1, ratio 6: a factor for the whole row changes nothing
    ("partial_rowwise_lamb, eps", {"eps": 3.0}, W, [G], [[0.9, 3.1, 0.5, 4.7]]),
    # rate 1 * 0.1 * 6/6; then half of the last move, and the rate's G
    (
        "lars_sgd",
        {"learning_rate": 1.0, "eta": 0.1, "momentum": 0.5},
        W,
        [G, [0.0] * 4],
        [[0.9, 3.1, 0.5, 4.7], [0.85, 3.15, 0.25, 4.55]],
    ),
    # rate 1 * 0.1 * 6 / (6 + 1 * 6) = 0.05, times G + W = [2, 2, 6, 8]
    (
        "lars_sgd, decay",
        {"learning_rate": 1.0, "eta": 0.1, "weight_decay": 1.0},
        W,
        [G],
        [[0.9, 2.9, 0.7, 4.6]],
    ),
]


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL])
@pytest.mark.parametrize(
    "name, params, row, gradients, expected", [pytest.param(*case, id=case[0].replace(", ", "-")) for case in CASES]
)
def test_a_row_moves_as_worked_out_by_hand(
    kind: ShardingType,
    name: str,
    params: dict[str, Any],
    row: list[float],
    gradients: list[list[float]],
    expected: list[list[float]],
) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=4, feature_names=["f"])
    module = EmbeddingBagCollection([table])
    with torch.no_grad():
        module.embedding_bags["t"].weight.copy_(torch.tensor([row] * 3))
    sharder = EmbeddingBagCollectionSharder({"optimizer": name.split(",")[0], "learning_rate": 0.1} | params)
    sharded = sharder.shard(module, {"t": cut(table, kind, [0])}, ShardingEnv.from_local(1, 0), DEVICE)
    weight = sharded.tables()["t"].local[0].weight
    for gradient, moved in zip(gradients, expected, strict=True):
        # half of the gradient from either bag: rows that a batch names twice move once
        bags = sharded(KeyedJaggedTensor(["f"], torch.tensor([1, 1]), lengths=torch.tensor([1, 1]))).wait().values()
        (bags * torch.tensor(gradient, device=DEVICE) / 2).sum().backward()
        torch.testing.assert_close(weight.clone(), torch.tensor([row, moved, row]), atol=1e-6, rtol=1e-5)
