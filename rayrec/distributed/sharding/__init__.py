"""Executors: a plan's rectangles turned into exchanges and lookups. Sharding types exist only in `cuts`."""
