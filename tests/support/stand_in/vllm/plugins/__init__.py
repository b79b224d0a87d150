"""Part of the stand-in: plugins are looked for as vLLM looks for them, once in each process."""

import os
from importlib.metadata import entry_points

plugins_loaded = False


def load_general_plugins() -> None:
    global plugins_loaded  # noqa: PLW0603 - a process loads them once
    if plugins_loaded:
        return
    plugins_loaded = True
    wanted = os.environ.get("VLLM_PLUGINS")
    for plugin in entry_points(group="vllm.general_plugins"):
        if wanted is None or plugin.name in wanted.split(","):
            plugin.load()()
