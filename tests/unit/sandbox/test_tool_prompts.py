"""What a code agent's prompt says of a tool whose arguments have more than a type."""

from __future__ import annotations

from sandbox.runner.tool_calling import CalledTool, in_words
from sandbox.types import ToolSpec


def test_what_a_schema_says_beside_the_type_stands_in_the_text_of_a_code_agents_prompt() -> None:
    spec = ToolSpec(
        "find",
        "Finds.",
        {
            "kind": {"type": "string", "description": "What.", "enum": ["pen", "größer"], "nullable": True},
            "plain": {"type": "integer", "description": "A number."},
        },
        "string",
    )
    told = in_words(spec)
    assert told.inputs == {
        "kind": {
            "type": "string",
            "description": 'What. JSON schema: {"enum": ["pen", "größer"]}',
            "nullable": True,
        },
        "plain": {"type": "integer", "description": "A number."},
    }
    assert 'kind: What. JSON schema: {"enum": ["pen", "größer"]}' in CalledTool(told).to_code_prompt()
