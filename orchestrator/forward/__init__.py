"""The independent forward pass: log-probs of trained tokens made again from the weights, and compared.

The only place that knows torch. Needs the extra `torch`.
"""
