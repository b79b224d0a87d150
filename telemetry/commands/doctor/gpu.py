"""What the GPUs can do, asked in a process of its own: a driver that hangs must not hang the doctor."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from telemetry.commands.doctor.checks import Check, Level

_DEVICE_FILES: Final = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")

# torch.cuda is arena.device.cuda's alone inside Arena; this program runs outside of it, and ends with its answer.
_PROGRAM: Final = """
import ctypes, json, torch
cuda = torch.cuda
found = {"available": cuda.is_available(), "devices": [], "peers": []}
if found["available"]:
    driver = ctypes.CDLL("libcuda.so.1")
    for index in range(cuda.device_count()):
        about = cuda.get_device_properties(index)
        handle, multicast = ctypes.c_int(), ctypes.c_int()
        cuda.current_device()
        known = driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), index) == 0
        known = known and driver.cuDeviceGetAttribute(ctypes.byref(multicast), 132, handle) == 0
        bus = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        try:
            node = int(open(f"/sys/bus/pci/devices/{bus}/numa_node").read())
        except (OSError, ValueError):
            node = None
        found["devices"].append({
            "name": about.name, "bytes": about.total_memory, "capability": [about.major, about.minor],
            "multicast": bool(multicast.value) if known else None, "node": node,
        })
    count = range(cuda.device_count())
    found["peers"] = [[a, b, cuda.can_device_access_peer(a, b)] for a in count for b in count if a != b]
print("ARENA" + json.dumps(found))
"""


class Gpus:
    """A question that is under way from the start, and answered, or not, by a deadline."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._reason = _nothing_to_ask()
        if not self._reason:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # ctrl-C ends the doctor, and the doctor ends it
            )

    def checks(self, deadline: float) -> list[Check]:
        """What they said by then."""
        if self._process is None:
            return [Check("GPU", Level.NOT_CHECKED, self._reason)]
        try:
            output, errors = self._process.communicate(timeout=max(0.05, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end()
            return [Check("GPU", Level.NOT_CHECKED, "torch has not answered", todo="--patience 60 waits longer")]
        return of_answer(output, errors)

    def _end(self) -> None:
        """Kill it; one that hangs in the driver can't die, and is not waited for."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        try:
            self._process.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            pass


def of_answer(output: str, errors: str) -> list[Check]:
    """The checks in what the program printed."""
    answer = next((line[5:] for line in output.splitlines() if line.startswith("ARENA")), None)
    if answer is None:
        said = errors.strip().splitlines()
        return [Check("GPU", Level.NOTE, f"torch can't ask: {said[-1] if said else 'it said nothing'}")]
    found = json.loads(answer)
    if not found["available"]:
        todo = "install torch's CUDA build and a driver that is as new (nvidia-smi tells its version)"
        return [Check("CUDA", Level.NOTE, "a device is there, and torch can't use it", "torch with CUDA", todo)]
    return [_devices(found["devices"]), _peers(found), _multicast(found["devices"])]


def _devices(devices: list[dict[str, Any]]) -> Check:
    names = [
        f"{index}: {one['name']} ({one['capability'][0]}.{one['capability'][1]}"
        + (f", NUMA node {one['node']})" if one["node"] is not None and one["node"] >= 0 else ")")
        for index, one in enumerate(devices)
    ]
    return Check("CUDA", Level.OK, "; ".join(names))


def _peers(found: dict[str, Any]) -> Check:
    refused = [f"{one}-{other}" for one, other, may in found["peers"] if not may]
    if not found["peers"]:
        return Check("peer access", Level.OK, "one device, nothing to reach")
    if refused:
        todo = "NVLink or PCIe without ACS between them; until then all-reduce takes NCCL (no_peer_access)"
        return Check("peer access", Level.NOTE, f"not between {', '.join(refused)}", "it between all devices", todo)
    return Check("peer access", Level.OK, f"between all {len(found['devices'])} devices")


def _multicast(devices: list[dict[str, Any]]) -> Check:
    able = sum(1 for one in devices if one["multicast"])
    if any(one["multicast"] is None for one in devices):
        return Check("multicast", Level.NOT_CHECKED, "the driver does not tell")
    if able < len(devices):
        todo = "nothing: all-reduce does without (no_multicast)"
        return Check("multicast", Level.NOTE, f"{able} of {len(devices)} devices", "NVSwitch and Hopper or later", todo)
    return Check("multicast", Level.OK, f"all {len(devices)} devices")


def _nothing_to_ask() -> str:
    if not any(Path(path).exists() for path in _DEVICE_FILES):
        return "no GPU: none of its device files is there"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed here"
    return ""
