"""What is kept of a run: its folder, the records that become its log, the copy in storage, and lists of runs."""
