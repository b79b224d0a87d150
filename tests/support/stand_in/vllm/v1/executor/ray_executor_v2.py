"""Part of the stand-in: an executor that is imported late, or never."""

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

__all__ = ["MessageQueue"]
