"""The form that actions of each kind of agent must have: code tags, tool calls, blocks with a command.

`well_formed` and `gives_answer` look at one action as it was sampled. The form of a program's actions is unknown:
they count as well formed if the model ended them itself, and the last one of a finished episode as the answer. The
same holds for an action of a shell agent without a call: it ends the work.
"""

import ast
import json
import re
import warnings
from typing import Any

from orchestrator.calls.formats import call_begins, written
from orchestrator.calls.parsed import parsed
from orchestrator.types import AgentSpec, Call, Completion, Turn

_MAX_PARSED_CHARS = 64 << 10
_MARKDOWN = ("```python", "```py")
# As sandbox/runner/shell_agent.py reads them.
_BASH_CALL = re.compile(r'"name"\s*:\s*"bash"')
_COMMAND_BEGINS = re.compile(r"^[ \t]*```(?:bash|sh|shell)[ \t]*$", re.MULTILINE)
_COMMAND = re.compile(rf"{_COMMAND_BEGINS.pattern}\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_PIECE = re.compile(r"""(?P<call>(?<![\w.])final_answer[ \t]*\()|\#|(?P<quote>\"{3}|'{3}|["'])""")
_REST_OF_STRING = {
    "'": re.compile(r"(?:[^\\\n]|\\[^\n])*?'"),
    '"': re.compile(r'(?:[^\\\n]|\\[^\n])*?"'),
    "'''": re.compile(r"(?:[^\\]|\\.)*?'''", re.DOTALL),
    '"""': re.compile(r'(?:[^\\]|\\.)*?"""', re.DOTALL),
}


def well_formed(agent: AgentSpec, turn: Turn) -> bool:
    """Whether an action is exactly one code block, or one tool call, in the agent's form; where calls are data, at
    least one call in the model's own format. A shell agent's action may also have none."""
    completion = turn.completion
    match agent.kind:
        case "code":
            return code_block(completion, agent.code_tags) is not None
        case "tool_calling":
            return bool(_calls(agent, turn) if turn.tools else tool_call(completion.visible))
        case "shell":
            text, cut = completion.visible, completion.finish_reason != "stop"
            if turn.tools and agent.call_format is not None:
                is_meant = call_begins(agent.call_format) in text or _BASH_CALL.search(text)
                return not cut and bool(_calls(agent, turn) or not is_meant)
            return not cut and len(_COMMAND_BEGINS.findall(text)) == len(_COMMAND.findall(text)) <= 1
    return completion.finish_reason == "stop"


def gives_answer(agent: AgentSpec, turn: Turn) -> bool:
    """Whether an action, the last one of a finished episode, gives the answer."""
    match agent.kind:
        case "code":
            return calls_final_answer(code_run(turn.completion.visible, agent.code_tags))
        case "tool_calling":
            # Where a call in the model's format is malformed, smolagents looks for JSON in the text.
            if calls := _calls(agent, turn):
                return [call.name for call in calls] == ["final_answer"]
            return (tool_call(turn.completion.visible) or {}).get("name") == "final_answer"
    return True


def plain_answer(agent: AgentSpec, answer: str, *, as_data: bool) -> tuple[str, str]:
    """An action that only gives this answer: (the text the agent gets, the whole text). `as_data`: where calls of
    tools are data."""
    match agent.kind:
        case "code":
            opening, closing = agent.code_tags
            visible = f"I give the answer.\n{opening}\nfinal_answer({answer!r})\n"
            return visible, visible + closing
        case "tool_calling":
            arguments = {"answer": answer}
            text = json.dumps({"name": "final_answer", "arguments": arguments}, ensure_ascii=False)
            if as_data and agent.call_format is not None:
                text = written("", [Call("", "final_answer", json.dumps(arguments))], agent.call_format)
            return text, text
    return answer, answer


def _calls(agent: AgentSpec, turn: Turn) -> tuple[Call, ...]:
    """The calls in an action as the agent got them: as data."""
    if agent.call_format is None or not turn.tools:
        return ()
    return parsed(turn.completion.visible, agent.call_format, turn.tools, turn.sequence).calls


def tool_call(visible: str) -> dict[str, Any] | None:
    """The one call in an action: a JSON object with name and arguments, from the first brace to the last, as
    smolagents parses it; None for every other text."""
    start, end = visible.find("{"), visible.rfind("}")
    if not 0 <= start < end or end - start > _MAX_PARSED_CHARS:
        return None
    try:
        call = json.loads(visible[start : end + 1], strict=False)
    except (ValueError, RecursionError):
        return None
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call
    return call if is_call else None


def code_block(completion: Completion, tags: tuple[str, str]) -> str | None:
    """The code of an action that is exactly one closed block; None for every other action."""
    opening, closing = tags
    _, has_opening, rest = completion.visible.partition(opening)
    code, has_closing, after = rest.partition(closing)
    if not has_opening or opening in code or opening in after or not code.strip():
        return None
    return code if has_closing or _closed_by_stop(completion, closing) else None


def _closed_by_stop(completion: Completion, closing: str) -> bool:
    """Whether sampling ended at the closing tag, which the agent then does not get."""
    if completion.finish_reason != "stop":
        return False
    behind = completion.unseen
    if closing in behind:
        return True
    # An endpoint without ids may not name the stop string: then the policy gets the benefit of the doubt.
    return completion.tokens_T is None and not behind


def code_run(visible: str, tags: tuple[str, str]) -> str:
    """The code smolagents takes from an action: its blocks, else a Markdown block, else everything."""
    if blocks := _blocks(visible, *tags):
        return "\n\n".join(blocks)
    for opening in _MARKDOWN:
        if blocks := _blocks(visible, opening, "\n```"):
            return "\n\n".join(blocks)
    return visible


def _blocks(text: str, opening: str, closing: str) -> list[str]:
    pieces = text.split(opening)[1:]
    return [piece.partition(closing)[0].strip() for piece in pieces]


def calls_final_answer(code: str) -> bool:
    """Whether `code` calls `final_answer`: in the code itself, not in a comment or a string."""
    if len(code) <= _MAX_PARSED_CHARS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escape sequences in the model's code
                tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return _final_answer_in_pieces(code)
        return any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "final_answer"
            for node in ast.walk(tree)
        )
    return _final_answer_in_pieces(code)


def _final_answer_in_pieces(code: str) -> bool:
    """For code that cannot be parsed, such as code with a stray line of prose. Comments and strings are skipped; a
    quote that is not closed in its line ends with the line. So each character is looked at a few times at most,
    whatever the model wrote."""
    at = 0
    while piece := _PIECE.search(code, at):
        if piece["call"]:
            return True
        quote = piece["quote"]
        if quote and (string := _REST_OF_STRING[quote].match(code, piece.end())):
            at = string.end()
        elif quote and len(quote) == 3:
            return False  # the rest is one string
        else:
            at = code.find("\n", piece.end()) + 1 or len(code)
    return False
