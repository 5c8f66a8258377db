"""From the config to what workers train: model, tables, learning rates, versions of the data, where a run begins."""
