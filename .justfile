# Everything here runs in the environment that README's test command makes.
python := ".venv/bin/python"

# The tests that CI runs; extra arguments go to pytest.
test *arguments:
    {{python}} -m pytest {{arguments}}

# What tests/test_boundaries.py checks, without pytest around it.
lint:
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy --strict arena telemetry
    .venv/bin/lint-imports

fmt:
    .venv/bin/ruff check --fix .
    .venv/bin/ruff format .

demo *arguments:
    .venv/bin/arena demo {{arguments}}

bench *arguments:
    {{python}} -m pip install --quiet -e '.[telemetry,bench]'
    .venv/bin/arena bench {{arguments}}

# The plugin in a real vLLM engine on the CPU, beside vLLM's own queue: minutes, and at first an environment of 3.5 GB.
vllm *arguments:
    {{python}} -m tests.vllm.prove {{arguments}}
