"""Uses of a trained run: evaluation, export, retrieval index, permutation importance."""
