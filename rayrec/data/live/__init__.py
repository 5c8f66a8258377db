"""Data that grows while a model trains: the join of requests with late labels, and sources that are followed."""
