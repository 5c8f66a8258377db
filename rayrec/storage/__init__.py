"""Files on any storage: URIs, file systems, finding and opening files, folders to write to. Independent of schemas."""
