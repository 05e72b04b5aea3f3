"""A model learns on this machine: `make learn`. The trainer is `trainer`, `loss`, `policy`: made to be copied."""
