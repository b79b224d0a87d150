"""Part of the stand-in for vLLM."""
