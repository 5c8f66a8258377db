"""The config of a training run: its sections, checks, file and generated reference."""
