"""How rollouts are graded: a small protocol, and the scorers that implement it."""
