"""Inputs as people publish and report them: what they ask of the data path."""
