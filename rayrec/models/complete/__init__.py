"""Models with their loss: each takes a `Batch` and returns (loss, logits `[B]`), and is named in a config."""
