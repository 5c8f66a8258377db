"""What every package may use: of its process imports, threads, signals, CPU and memory limits; the base of configs.

`fbgemm_version` checks the installed torch and fbgemm_gpu, `imports` loads names on first use, `numba_loops` compiles
loops, `cgroup_limits` reads what the process may use, `threads` runs background work, `stop_signals` lists the signals
that end a command and keeps their handlers, `debug` reads RAYREC_DEBUG, `local_ray` starts Ray on this machine,
`ranks` writes ranks, and `streamable` defines what a pipeline requires of a batch. `strict` has the base classes of
config sections.
"""
