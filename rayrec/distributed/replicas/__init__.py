"""2D parallelism: replicas of sharding groups. Tables are sharded inside a group, and each group has all of them.

`layout` says which ranks are a group, `env` joins them, `meeting` makes every step's update one of all groups,
`averaging` makes groups alike again after some steps of their own, `collection` is the model.
"""

from rayrec.distributed.replicas.env import ShardingEnv2D
from rayrec.distributed.replicas.layout import GroupLayout

__all__ = ["GroupLayout", "ShardingEnv2D"]
