"""What every rank does: its session, its rows, the steps in lockstep, evaluation, position and figures of a window."""
