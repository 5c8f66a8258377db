"""2D parallelism: tables are sharded inside a group of ranks, and every group holds a replica of all tables.

| file | holds |
|---|---|
| `layout.py` | ranks to sharding groups |
| `env.py` | the process groups |
| `gradients.py` | averages gradients over replicas in every step |
| `averaging.py` | averages weights after several local steps |

The model is `rayrec.distributed.dmp_collection`.
"""

from rayrec.distributed.replicas.env import ShardingEnv2D
from rayrec.distributed.replicas.layout import GroupLayout

__all__ = ["GroupLayout", "ShardingEnv2D"]
