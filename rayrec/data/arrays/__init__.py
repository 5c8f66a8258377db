"""Arrow and NumPy helpers without rayrec's own concepts: buffers, types, list columns, hashes."""
