"""The cost model: seconds and bytes of one shard, and the estimate of a whole plan."""
