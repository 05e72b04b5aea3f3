"""Agent frameworks in an image of their own, with a program for each in `examples/agents`."""
