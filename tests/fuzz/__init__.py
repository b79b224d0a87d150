"""Every byte that comes from another process, made wrong in every way that can be thought of, and in millions more."""
