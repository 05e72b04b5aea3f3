"""Whether this machine, endpoint and keys are fit for a run: what `orchestrator doctor` looks at.

Each check yields findings, and none of them raises for what it finds. Nothing here samples more than the probes
that every run sends, or prints a key.
"""
