"""The three executors: pooled, sequences and replicated lookups."""
