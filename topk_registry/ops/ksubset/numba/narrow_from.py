"""From which k on rows are tried as narrow ones, and taken one at a time, see "Large k" in README.md and docs/speed.md.

Python chooses the entries by it: those for small k are compiled without the code for large ones, and conversely.
"""

LEAST_K = 6  # of targets on many classes
LEAST_K_OF_LABEL = 32
