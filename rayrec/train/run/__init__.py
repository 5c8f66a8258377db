"""The run folder: its files, the event log, the mirror in remote storage, and listings of runs."""
