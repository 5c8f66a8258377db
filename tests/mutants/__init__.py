"""`make mutants`: small random faults put into the code, one at a time, to see whether tests notice.

cosmic-ray makes the faults: it changes the source text itself, so that a fault also reaches ranks, read tasks and other
processes that a test starts, which mutmut's switches inside one process do not. Which tests can notice a fault comes
from a coverage run that knows the test behind each line; what it found is kept until a test or its sources change.
Nothing of the checkout is changed: faults go into a copy.

Only fast tests judge: those without the marks `slow`, `long` and `gpu` that start no Ray in their process. Each fault
meets the quick ones among those that run its line first, at most `--seconds` of them, up to the first that fails. A
fault that no fast test runs is told as such, and one that changes nothing is named with the reason (`equivalent.py`).

A run may be cut off: the same command goes on with the faults that were not tried yet, and tries those again that were
not noticed once their tests have changed.
"""
