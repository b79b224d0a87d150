"""The parts of the `arena` command, one module each; telemetry.cli loads the one that is asked for."""
