"""What the driver's process does: connects Ray, starts and restarts the workers, shows and keeps what they report."""
