"""TorchRec's planner constants, in bytes and bytes per millisecond. rayrec's planner does not use them."""

from __future__ import annotations

from rayrec.distributed.plan.shards import DEFAULT_LOAD_FACTOR
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

GIB = 1 << 30

BATCH_SIZE = 512
HBM_CAP = 32 * GIB
DDR_CAP = 128 * GIB
SSD_CAP = 2048 * GIB
HBM_MEM_BW = 897 * GIB / 1000
DDR_MEM_BW = 51 * GIB / 1000
SSD_MEM_BW = 0.1 * (1 << 20)
HBM_TO_DDR_MEM_BW = 32 * GIB / 1000
INTRA_NODE_BANDWIDTH = 600 * GIB / 1000
CROSS_NODE_BANDWIDTH = 12.5 * GIB / 1000
MIN_CW_DIM = 128
POOLING_FACTOR = 1.0
NUM_POOLINGS = 1.0
BIGINT_DTYPE = 8
UVM_CACHING_RATIO = DEFAULT_LOAD_FACTOR
KV_CACHING_RATIO = 0.2
BWD_COMPUTE_MULTIPLIER = 2
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER = 1
MAX_SIZE = (1 << 63) - 1
