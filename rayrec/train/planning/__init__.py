"""Sharding plans of a config: for the cluster of a run, and without a cluster for `rayrec plan`."""
