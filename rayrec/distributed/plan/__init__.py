"""Sharding plans: shards of tables, the whole plan and its JSON, and the interface of sharders."""
