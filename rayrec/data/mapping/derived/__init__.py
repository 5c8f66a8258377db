"""Columns computed from other columns: their description in the config, and the code that computes them."""
