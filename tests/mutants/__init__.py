"""`make mutants`: small random faults put into the code, one at a time, to see whether tests notice.

cosmic-ray makes the faults: it changes the source text itself, so that a fault also reaches ranks, read tasks and other
processes that a test starts, which mutmut's switches inside one process do not. Which tests can notice a fault comes
from a coverage run that knows the test behind each line. Nothing of the checkout is changed: faults go into a copy.
"""
