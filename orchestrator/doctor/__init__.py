"""The checks of `orchestrator doctor`: whether this machine, the endpoint and the keys are fit for a run.

Each check yields findings, and none raises for what it finds. No check samples more than the probes that every
run sends, and none prints a key.
"""
