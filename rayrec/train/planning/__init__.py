"""Plans of a config: for the cluster of a run, and on paper for `rayrec plan`."""
