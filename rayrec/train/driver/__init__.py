"""The driver's process: connects to Ray, starts and restarts the workers, and shows and keeps what they report.

The private parts of Ray that this needs are in `rayrec/_runtime/ray_internals.py`.
"""
