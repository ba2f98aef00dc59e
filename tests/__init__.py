"""Workers of ``pytest -n`` share the processors.

torch's threads wait for each other by spinning: with more of them than processors, most of the time goes into waiting.
torch reads the variable when it is loaded, here and in every process that a test starts.
"""

import os

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))
