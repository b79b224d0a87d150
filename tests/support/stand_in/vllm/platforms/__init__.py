"""Part of the stand-in: what the engine runs on, a CPU unless the environment says GPU."""

import os


class Platform:
    def is_cpu(self) -> bool:
        return os.environ.get("STAND_IN_PLATFORM") != "gpu"


current_platform = Platform()
