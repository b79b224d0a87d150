"""The example for Ray, run as it stands, where Ray is installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra: ray)")
@pytest.mark.parametrize(("host", "kind"), [("", "Reader"), ("another", "RemoteReader")])
def test_workers_that_ray_places_read_the_engines_queue(run_dir, host, kind):
    program = (
        "import ray, sys; sys.path.insert(0, 'examples'); import ray_queue\n"
        "env = {'PYTHONPATH': '.:examples', 'ARENA_HOST_ID': sys.argv[1]}\n"
        "ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={'env_vars': env})\n"
        "print(ray_queue.main('127.0.0.1'))\n"
    )
    environment = {key: text for key, text in os.environ.items() if key != "ARENA_HOST_ID"} | {"PYTHONPATH": "."}
    ran = subprocess.run(
        [sys.executable, "-c", program, host],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=environment,
    )
    assert ran.stdout.splitlines()[-1:] == [str([(kind, 5 * 499_500)] * 2)], ran.stderr
