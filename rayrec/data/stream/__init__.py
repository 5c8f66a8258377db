"""Reads windows in a given order, through Ray Data or in a thread, and cuts their rows into batches."""
