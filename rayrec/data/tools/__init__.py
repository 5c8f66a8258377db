"""What people run before training: inspect, check, convert, count vocabularies, generate data."""
