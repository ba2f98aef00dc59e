"""From which k on rows are tried as narrow ones; below, they are quicker as any others, see docs/speed.md.

Python chooses the entries by it: those for small k are compiled without the code for narrow rows.
"""

LEAST_K = 6  # of targets on many classes
LEAST_K_OF_LABEL = 32
