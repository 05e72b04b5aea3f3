"""The formats of tool calls: which one a chat template has, and how calls in each are read, begun and written.

hermes: Hermes, Qwen2.5, Qwen3: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`.

qwen3_coder: `<function=NAME>` with a `<parameter=KEY>` for each argument, inside `<tool_call>`. Values are bare
text, so the tool's schema says which of them are texts. Others are JSON, except that the model's own chat
template prints Python's True, False and None. The models forget the outer tags now and then: `<function=` and
`</function>` are enough.

llama3: the whole text is a JSON object with name and parameters, or several with `;` between them. Some of the
models write `<|python_tag|>` before it, and some "arguments" for "parameters". Behind that tag there may be
Python for the tools that are built into Llama 3.1; that is not read as a call.

mistral: `[TOOL_CALLS]` and a JSON array of calls; since 2025 `[TOOL_CALLS]NAME[ARGS]{...}` for each call.
Between name and arguments an id may stand. Ids that the model wrote are not used.

deepseek: V3 and R1 write `function`, a separator, the name and a fenced JSON block; V3.1 name, separator, JSON.

gpt_oss ("harmony"): messages of a header and a body, each to a channel or to a function. A call's header names the
function before or behind the channel. The models call from any channel, though they are told to use
`commentary`, and leave out `functions.` in long conversations. Reasoning (`analysis`) is not part of the
content. The text may begin behind a header that was cut off with the reasoning.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import orjson

from orchestrator.calls.declared import declared
from orchestrator.calls.source import Called, Source
from orchestrator.types import Call, CallFormat, Tools

CALL_ENDS = "<|call|>"  # of gpt_oss


@dataclass(frozen=True, slots=True)
class Format:
    """`read` yields the texts around calls and the calls, in their order; it raises ValueError or
    RecursionError at a malformed call. `begin`: the text with which a demanded call begins, of this function or
    (None) of any, with the chat template, which tells the generations of Mistral's and DeepSeek's models apart.
    `write`: one call, by its name in JSON. `between` and `around`: what stands between several calls, and
    before and behind all. `lacking`: what a demanded call lacks that ends with its arguments, as a schema has it.
    """

    read: Callable[[str, Tools], Iterator[str | Called]]
    begin: Callable[[str | None, str], str]
    write: Callable[[str, Call], str]
    between: str = "\n"
    around: tuple[str, str] = ("", "")
    lacking: str = ""


# ---------------------------------------------------------------- hermes, llama3


def _read_hermes(text: str, tools: Tools) -> Iterator[str | Called]:
    source = Source(text)
    yield source.before("<tool_call>")
    while source.has("<tool_call>"):
        yield source.call("arguments")
        source.close("</tool_call>")
        yield source.before("<tool_call>")


def _begin_hermes(name: str | None, template: str) -> str:
    return '<tool_call>\n{"name": ' + ('"' if name is None else f'{json.dumps(name)}, "arguments": ')


def _write_hermes(name: str, call: Call) -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def _read_llama3(text: str, tools: Tools) -> Iterator[str | Called]:
    source, tag = Source(text), "<|python_tag|>"
    yield "" if source.comes("{") else source.before(tag)
    while not source.ended():
        source.has(tag)
        yield source.call("parameters", "arguments")
        if not source.ended():
            source.take(";")


def _begin_llama3(name: str | None, template: str) -> str:
    return '{"name": ' + ('"' if name is None else f'{json.dumps(name)}, "parameters": ')


def _write_llama3(name: str, call: Call) -> str:
    return f'{{"name": {name}, "parameters": {call.arguments}}}'


# ---------------------------------------------------------------- qwen3_coder

_TAG, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_FUNCTION_ENDS, _PARAMETER_ENDS = "</function>", "</parameter>"
# A text may hold a closing tag. The one that ends it comes before another parameter or the function's end.
_TEXT_ENDS = re.compile(rf"\n?{_PARAMETER_ENDS}(?=\s*(?:{_PARAMETER}|{_FUNCTION_ENDS}))")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "null": "null"}


def _read_qwen3_coder(text: str, tools: Tools) -> Iterator[str | Called]:
    schemas, source = declared(tools), Source(text)
    yield source.before(_TAG, _FUNCTION)
    while source.comes(_TAG, _FUNCTION):
        source.has(_TAG)
        source.take(_FUNCTION)
        name = source.until(">")
        values: dict[str, str] = {}
        while source.has(_PARAMETER):
            key = source.until(">")
            values[key] = _qwen3_coder_value(source, schemas.types(name, key))
        source.take(_FUNCTION_ENDS)
        source.has("</tool_call>")
        yield name, f"{{{', '.join(f'{_quoted(key)}: {value}' for key, value in values.items())}}}"
        yield source.before(_TAG, _FUNCTION)


def _qwen3_coder_value(source: Source, types: Set[str]) -> str:
    """The JSON text of the value that comes next. `types`: that it may have; empty: unknown."""
    typed = types and "string" not in types
    if typed and (value := source.json_before(_PARAMETER_ENDS)) is not None:
        return value
    text = source.through(_TEXT_ENDS).removeprefix("\n")
    constant = _CONSTANTS.get(text.strip())
    return constant if constant and (typed or (constant == "null" and "null" in types)) else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _begin_qwen3_coder(name: str | None, template: str) -> str:
    return f"{_TAG}\n{_FUNCTION}" + ("" if name is None else f"{name}>\n")


def _write_qwen3_coder(name: str, call: Call) -> str:
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        return f"<tool_call>\n<function={call.name}>\n{call.arguments}"
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in texts.items())
    return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"


# ---------------------------------------------------------------- mistral

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read_mistral(text: str, tools: Tools) -> Iterator[str | Called]:
    source = Source(text)
    yield source.before(_CALLS)
    while source.has(_CALLS):
        if source.has("["):
            yield source.call("arguments")
            while source.has(","):
                yield source.call("arguments")
            source.take("]")
        else:  # some servers do not print the control token [ARGS]
            name = source.before(_ID, _ARGUMENTS, "{").strip()
            if source.has(_ID):
                source.before(_ARGUMENTS, "{")
            source.has(_ARGUMENTS)
            yield name, source.arguments()
        yield source.before(_CALLS)


def _begin_mistral(name: str | None, template: str) -> str:
    if name is None:
        return _CALLS
    if _ARGUMENTS in template:
        return f"{_CALLS}{name}{_ARGUMENTS}"
    return f'{_CALLS} [{{"name": {json.dumps(name)}, "arguments": '


def _write_mistral(name: str, call: Call) -> str:
    return f'{{"name": {name}, "arguments": {call.arguments}}}'


# ---------------------------------------------------------------- deepseek

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGINS, _SEPARATES, _ENDS = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIND, _FENCE, _FENCE_ENDS = "function", "```json", "```"


def _read_deepseek(text: str, tools: Tools) -> Iterator[str | Called]:
    source = Source(text)
    yield source.before(_ALL_BEGIN)
    while source.has(_ALL_BEGIN):
        while source.has(_BEGINS):
            yield _deepseek_call(source)
            source.close(_ENDS)
        source.close(_ALL_END)
        yield source.before(_ALL_BEGIN)


def _deepseek_call(source: Source) -> Called:
    name = source.until(_SEPARATES)
    if source.comes("{", '"'):
        return name, source.arguments()
    if name != _KIND:
        raise ValueError("a call of another kind")
    name = source.until(_FENCE)
    arguments = source.arguments()
    source.close(_FENCE_ENDS)
    return name, arguments


def _begin_deepseek(name: str | None, template: str) -> str:
    opening = _ALL_BEGIN + _BEGINS
    if _FENCE not in template:
        return opening + ("" if name is None else f"{name}{_SEPARATES}")
    return f"{opening}{_KIND}{_SEPARATES}" + ("" if name is None else f"{name}\n{_FENCE}\n")


def _write_deepseek(name: str, call: Call) -> str:
    return f"{_BEGINS}{_KIND}{_SEPARATES}{call.name}\n{_FENCE}\n{call.arguments}\n{_FENCE_ENDS}{_ENDS}"


# ---------------------------------------------------------------- gpt_oss

_START, _CHANNEL, _MESSAGE, _TURN_ENDS = "<|start|>", "<|channel|>", "<|message|>", ("<|end|>", "<|return|>")
_TO, _FUNCTIONS = "to=", "functions."


def _read_gpt_oss(text: str, tools: Tools) -> Iterator[str | Called]:
    source = Source(text)
    if not source.comes(_START, _CHANNEL, _TO):
        yield _gpt_oss_body(source)
    while not source.ended():
        source.has(_START)
        words = source.until(_MESSAGE).replace("<|", " <|").replace("|>", "|> ").split()
        recipient = next((word.removeprefix(_TO) for word in words if word.startswith(_TO)), None)
        if recipient is not None:
            yield recipient.removeprefix(_FUNCTIONS), source.arguments()
            source.close(CALL_ENDS, *_TURN_ENDS)
            continue
        body = _gpt_oss_body(source)
        if "analysis" not in words:
            yield body


def _gpt_oss_body(source: Source) -> str:
    text = source.before(*_TURN_ENDS, CALL_ENDS, _START, _CHANNEL)
    any(map(source.has, (*_TURN_ENDS, CALL_ENDS)))
    return text


def _begin_gpt_oss(name: str | None, template: str) -> str:
    opening = f"{_CHANNEL}commentary {_TO}{_FUNCTIONS}"
    return opening if name is None else f"{opening}{name} <|constrain|>json{_MESSAGE}"


def _write_gpt_oss(name: str, call: Call) -> str:
    return f"{_begin_gpt_oss(call.name, '')}{call.arguments}{CALL_ENDS}"


# ---------------------------------------------------------------- all of them

FORMATS: Mapping[CallFormat, Format] = {
    "hermes": Format(_read_hermes, _begin_hermes, _write_hermes, lacking="}\n</tool_call>"),
    "qwen3_coder": Format(_read_qwen3_coder, _begin_qwen3_coder, _write_qwen3_coder),
    "llama3": Format(_read_llama3, _begin_llama3, _write_llama3, "; ", lacking="}"),
    "mistral": Format(_read_mistral, _begin_mistral, _write_mistral, ", ", (f"{_CALLS} [", "]"), "}]"),
    "deepseek": Format(_read_deepseek, _begin_deepseek, _write_deepseek, around=(_ALL_BEGIN, _ALL_END)),
    "gpt_oss": Format(_read_gpt_oss, _begin_gpt_oss, _write_gpt_oss, "<|start|>assistant"),
}
# What templates of a format hold, all of it. The first that fits counts.
_SIGNS: tuple[tuple[CallFormat | None, tuple[str, ...]], ...] = (
    (None, ("<tool_call>", "<arg_key>")),  # GLM: tags around keys and values
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", (_ALL_BEGIN,)),
    ("gpt_oss", ("<|channel|>", "functions.")),
    ("llama3", ("ipython", '"parameters"')),
)


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template prints calls in. None: it prints no tools, or calls in another format."""
    if not re.search(r"\btools\b", template):
        return None  # as DeepSeek's own templates, which print calls and never tools
    return next((format for format, signs in _SIGNS if all(sign in template for sign in signs)), None)


def guidable(format: CallFormat | None) -> bool:
    """Whether the JSON of the arguments follows `forced` with a name, so that an endpoint that keeps to schemas
    can keep a demanded call to its own."""
    return format not in (None, "qwen3_coder")


def call_begins(format: CallFormat) -> str:
    """What stands before every call, in all generations of its models."""
    return FORMATS[format].begin(None, "").split()[0]


def unclosed(format: CallFormat | None, opening: str) -> str:
    """What a demanded call that began like this lacks, if it ends with its arguments, as a schema has it."""
    inside = opening.endswith(('"arguments": ', '"parameters": '))
    return FORMATS[format].lacking if format and inside else ""


def forced(format: CallFormat, name: str | None, template: str = "") -> str:
    """The text that a completion begins with where a call is demanded: of this function, or (None) of any.

    It is put in front of the sampled text before that is parsed. `template`: the chat template.
    """
    return FORMATS[format].begin(name, template)


def written(content: str, calls: Sequence[Call], format: CallFormat) -> str:
    """Calls as the model would have written them, behind the content: the inverse of `parsed`, for calls that came
    without their text. Arguments that are not JSON stay as they are."""
    if not calls:
        return content
    form = FORMATS[format]
    before, behind = form.around
    texts = form.between.join(form.write(json.dumps(call.name), call) for call in calls)
    apart = "\n" if content and not content.endswith("\n") else ""
    return f"{content}{apart}{before}{texts}{behind}"
