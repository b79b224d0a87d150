"""The plugin in a real engine: `python -m tests.vllm.prove`. Not part of the normal tests."""
