"""The search, in this order: options, problem, bound, choose, pack, refine, solve, build, what_if."""
