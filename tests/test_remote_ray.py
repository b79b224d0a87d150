"""The example for Ray, run as it stands and on a cluster of two nodes, where Ray is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOTAL = 5 * 499_500

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra: ray)")

# One worker fits on each node, so the scheduler needs both. The second one says that it is another host.
TWO_NODES = """
import ray, ray_queue
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
try:
    cluster.add_node(**node, env_vars={"ARENA_HOST_ID": "another"})
    ray.init(address=cluster.address, log_to_driver=False)
    print(sorted(ray_queue.main("127.0.0.1")))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def run(*command: str) -> list[str]:
    """What a program prints whose Ray and whose workers find this repository."""
    environment = {key: text for key, text in os.environ.items() if key not in ("ARENA_HOST_ID", "RAY_ADDRESS")}
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_on_one_machine_every_worker_shares_memory_with_the_engine(run_dir):
    assert run("examples/ray_queue.py")[-2:] == [f"Reader: {TOTAL}"] * 2


def test_a_worker_that_the_scheduler_puts_on_another_host_reads_over_the_network(run_dir):
    assert run("-c", TWO_NODES)[-1:] == [str([("Reader", TOTAL), ("RemoteReader", TOTAL)])]
