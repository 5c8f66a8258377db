"""Where files lie: URIs, file systems, finding and opening files, folders to write in. Knows nothing of schemas."""
