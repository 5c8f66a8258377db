"""The run folder: its files, the event log, and the mirror in remote storage."""
