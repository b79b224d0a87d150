"""A stand-in with vLLM's public names, for tests where vLLM is not installed. Its queue is a pipe to each reader."""
