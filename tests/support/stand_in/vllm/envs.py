"""Part of the stand-in: settings."""

VLLM_RINGBUFFER_WARNING_INTERVAL = 60
