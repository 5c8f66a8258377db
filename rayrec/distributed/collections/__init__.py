"""Sharded collections, their sharders, tables and optimizer.

| file | holds |
|---|---|
| `sharded_collection.py` | `ShardedCollection`: the three stages of a step, for both kinds of collection |
| `embedding_bag.py`, `embedding.py` | the two sharded collections and their sharders |
| `sharder.py` | `CollectionSharder`: turns a collection and its plan into the sharded collection |
| `sharded_table.py` | `ShardedTable`: a table's parameters and state under the unsharded names |
| `fused_optimizer.py` | the optimizer inside backward, as a `torch.optim` optimizer |
| `variable_batch.py` | batches whose size varies by key |
"""
