"""A Ray cluster of two nodes on this machine, in a process of its own: Ray warns, which the tests take for errors."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SCRIPT = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node)
cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of the cluster."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_raylet_start_wait_time_s": "300"},  # the machine may be busy
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, process.communicate()[1]
        yield address
    finally:
        try:
            process.communicate("", timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
