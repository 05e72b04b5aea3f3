"""The endpoint that an agent program asks for completions, under the APIs that programs know.

`server` listens on the sandbox's own loopback device. `chat`, `completions`, `responses` and `messages` each read
one API's requests and write its answers, events and errors; `checks` and `tools` are what they share. Every
completion goes through the runner's lease like any other: budgets hold, and it is recorded. The orchestrator
decides the model and the sampling. Everything else that a request asks for is done, or refused by name with what
to use instead. Requests come from code of the worker's identity: they are bounded and checked.
"""
