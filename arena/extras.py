"""Libraries of extras: imported where they are needed and nowhere else, and missed with a sentence that helps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from arena.errors import MissingLibrary


def require(module: str) -> Any:
    """A module of a library that the extra ``remote`` brings.

    Raises:
        MissingLibrary: says which extra that is.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name != library:
            raise
        raise MissingLibrary(
            f"{ {'zmq': 'pyzmq'}.get(library, library) } is not installed",
            expected="it, for readers on other hosts and for the restricted serializer",
            remedy="run: pip install 'arena-dataplane[remote]'",
        ) from None
