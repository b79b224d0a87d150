"""What has to be seen on a GPU: ``pytest -m gpu tests/gpu``, with nothing but torch and pytest."""
