"""Reading in a given order: pieces of windows, through Ray Data or in a thread, cut into batches."""
