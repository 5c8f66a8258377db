"""Sharding plans of a config without a cluster, for `rayrec plan`."""
