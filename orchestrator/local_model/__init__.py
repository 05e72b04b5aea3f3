"""A small language model on this machine's CPU, for demonstrations and tests: weights, tokenizer, server.

    python -m orchestrator.local_model fetch [--model NAME]
    python -m orchestrator.local_model serve [--model NAME] [--port P]

A tool of its own: it imports nothing of the orchestrator, and the orchestrator talks to it as to any
other endpoint. Needs the extra `local-model`.
"""
