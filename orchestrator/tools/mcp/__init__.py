"""The operator's MCP servers (`env.mcp_servers`), run or reached outside of sandboxes; their tools are host tools.

`server` keeps one of them and decides whose fault a failure is; `session` speaks the protocol; `process` runs a
server and bounds what it prints; `schemas` and `results` translate between MCP and smolagents.
"""
