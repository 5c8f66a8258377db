"""What is done with a trained run: evaluation, export, permutation importance."""
