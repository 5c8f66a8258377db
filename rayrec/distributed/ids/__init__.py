"""input_dist: ids are checked, split by owner and sent to the ranks that hold their rows."""
