"""Long runs. Each is a command of its own; a short slice of it is among the tests."""
