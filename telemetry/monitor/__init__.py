"""The live monitor: what `arena top` shows and `arena doctor` explains.

One way through it: a source (`local.py`: probe pages, `remote.py`: an exporter's metrics) takes a `Moment`, plain
facts; `recent.py` compares it with the moments before; `words.py` says in sentences what is wrong; `screen.py` draws it
all as lines; and `live.py` keeps the lines on a terminal until somebody has seen enough.
"""

from telemetry.monitor.facts import Moment, QueueFacts, ReaderFacts, Unreachable
from telemetry.monitor.recent import Recent

__all__ = ["Moment", "QueueFacts", "ReaderFacts", "Recent", "Unreachable"]
