"""Figures that scripts read."""

from __future__ import annotations

import pytest

from rayrec.torchrec.distributed.planner import constants


def test_constants_are_torchrecs() -> None:
    assert {name: value for name, value in vars(constants).items() if name.isupper()} == {
        "GIB": 2**30,
        "BATCH_SIZE": 512,
        "HBM_CAP": 32 * 2**30,
        "DDR_CAP": 128 * 2**30,
        "SSD_CAP": 2 * 2**40,
        "HBM_MEM_BW": pytest.approx(897 * 2**30 / 1000),
        "DDR_MEM_BW": pytest.approx(51 * 2**30 / 1000),
        "SSD_MEM_BW": pytest.approx(0.1 * 2**20),
        "HBM_TO_DDR_MEM_BW": pytest.approx(32 * 2**30 / 1000),
        "INTRA_NODE_BANDWIDTH": pytest.approx(600 * 2**30 / 1000),
        "CROSS_NODE_BANDWIDTH": pytest.approx(12.5 * 2**30 / 1000),
        "MIN_CW_DIM": 128,
        "POOLING_FACTOR": 1.0,
        "NUM_POOLINGS": 1.0,
        "BIGINT_DTYPE": 8,
        "UVM_CACHING_RATIO": 0.2,
        "KV_CACHING_RATIO": 0.2,
        "BWD_COMPUTE_MULTIPLIER": 2,
        "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER": 1,
        "MAX_SIZE": 2**63 - 1,
        "DEFAULT_LOAD_FACTOR": 0.2,
    }
