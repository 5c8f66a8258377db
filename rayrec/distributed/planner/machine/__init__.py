"""The cluster to plan for: hosts, memory, device speeds and their calibration."""
