"""output_dist: vectors go back to the ranks that asked, gradients the same way in reverse."""
