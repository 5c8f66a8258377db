"""The driver process: connects to Ray, starts and restarts the workers, and shows and stores their records.

Access to Ray's private API is in `rayrec/_runtime/ray_internals.py`.
"""
