"""The vLLM plugin: Arena's queue behind the signature of vLLM's `MessageQueue`.

vLLM calls `register`, the entry point ``arena`` of ``vllm.general_plugins``, in every process of an engine. By then
its executors have bound the name `MessageQueue`, so it is bound anew wherever it stands: in vLLM's own module, in the
executors, and in those of a platform that brings its own. An executor that is imported later finds the new one.

``ARENA_VLLM`` chooses: "1" (default) takes the queue's place, "0" leaves vLLM as it is, and "observe" leaves vLLM's
queue in place and measures it.

Nothing here imports vLLM before `register` is called, and `import arena` imports nothing from here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, Final

from arena.errors import InvalidArgument

SWITCH: Final = "ARENA_VLLM"
SHM_BROADCAST: Final = "vllm.distributed.device_communicators.shm_broadcast"
_NEEDED: Final = ("create_from_handle", "export_handle", "wait_until_ready", "enqueue", "dequeue", "broadcast_object")

__all__ = ["register"]


def register() -> None:
    """Put Arena's queue in the place of vLLM's, in this process. Called twice, it does nothing the second time.

    Raises:
        InvalidArgument: ``ARENA_VLLM`` is none of its choices.
    """
    mode = os.environ.get(SWITCH, "1")
    if mode not in ("0", "1", "observe"):
        raise InvalidArgument(f"{SWITCH} is none of its choices", expected="1, 0 or observe", found=repr(mode))
    if mode == "0":
        return
    from arena.integrations.vllm.queue import queue_class

    log = logger()
    original = _original()
    if original is None or hasattr(original, "arena_mode"):
        return
    if mode == "observe":
        from arena.integrations.vllm.observer import observed_class

        bound = rebind(original, observed_class(original))
        log.info("Arena measures vLLM's queue, and leaves it in place (%s=observe); in %s", SWITCH, ", ".join(bound))
    else:
        bound = rebind(original, queue_class(original))
        log.info("Arena's queue takes the place of vLLM's (%s=0 goes back) in %s", SWITCH, ", ".join(bound))


def rebind(original: type, replacement: type) -> list[str]:
    """Bind `replacement` to the name `MessageQueue` in every loaded module that has `original` there; names them."""
    bound = []
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", {})  # not getattr for the name itself: a lazy module would import for it
        if names.get("MessageQueue") is original:
            names["MessageQueue"] = replacement
            bound.append(name)
    return sorted(bound)


def logger() -> Any:
    """vLLM's own: what is said lands where its users look."""
    return import_module("vllm.logger").init_logger("vllm.arena")


def _original() -> Any:
    """vLLM's class; None, and a sentence in the log, where this vLLM has none that could be replaced."""
    try:
        found = import_module(SHM_BROADCAST).MessageQueue
        lacking = [name for name in _NEEDED if not hasattr(found, name)]
    except (ImportError, AttributeError) as error:
        found, lacking = None, [str(error)]
    if lacking:
        logger().warning("Arena leaves this vLLM's queue in place, which it does not know: %s", ", ".join(lacking))
        return None
    return found
