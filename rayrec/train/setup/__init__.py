"""Builds what workers train from the config: model, tables, optimizers, initial weights, sharding plan."""
