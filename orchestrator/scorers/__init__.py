"""How rollouts are graded: one small protocol, one file per way."""
