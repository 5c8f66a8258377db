"""Where files lie: URIs, file systems, finding and opening files. Knows nothing of schemas."""
