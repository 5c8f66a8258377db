"""Converts CSV, JSON lines, Avro and ORC to Parquet."""
