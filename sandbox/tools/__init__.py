"""Tools that live in the sandbox. Those that need keys or a network are the orchestrator's."""
