"""Executors: each runs the stages `prepare`, `lookup` and `output_dist` for one kind of lookup.

| file | executor |
|---|---|
| `setup.py` | settings of a collection, and the executors' interface |
| `pooled.py` | pooled lookups of sharded tables, in one tier or two |
| `sequences.py` | lookups of sharded tables id by id, or of distinct ids |
| `replicated.py` | lookups of data-parallel tables |
"""
