"""output_dist: sends vectors back to the ranks that asked for them, and gradients in reverse."""
