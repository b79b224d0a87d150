"""Reads what arena leaves behind, and tells it to people and to monitoring systems.

Everything here works from the probe pages that a queue's processes write, so it also works while those processes are
hung, and after they are dead. `arena` knows nothing of this package.
"""

__version__: str


def __getattr__(name: str) -> str:
    # pyproject.toml is the one place that states the version; nobody pays for reading it back unless they ask.
    if name == "__version__":
        from importlib.metadata import version

        return version("arena-dataplane")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
