"""What a tool of a server answers, as the one text that an agent gets."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.rules.redact import Secret
from orchestrator.rules.text import valid
from orchestrator.tools.functions import MAX_RESULT_CHARS


def text_of_result(result: Mapping[str, Any], keys: Sequence[Secret]) -> str:
    """Texts as they are, one behind the other; without one, the structured content as JSON. What is no text is
    named in its place. `keys` are taken out."""
    blocks = result.get("content")
    parts = [_part(block) for block in blocks if isinstance(block, Mapping)] if isinstance(blocks, list) else []
    structured = result.get("structuredContent")
    text = "\n".join(parts)
    if structured is not None and not any(_is_text(block) for block in blocks or ()):
        text = "\n".join([json.dumps(without_keys(structured, keys), ensure_ascii=False), *parts])
    return clean(text, keys)


def clean(text: str, keys: Sequence[Secret]) -> str:
    """Text of a server, bounded and without the keys that it was given."""
    text = without_keys(text, keys)
    if len(text) > MAX_RESULT_CHARS:
        text = f"{text[:MAX_RESULT_CHARS]}\n[cut: {len(text) - MAX_RESULT_CHARS} more characters]"
    return valid(text)


def without_keys(value: Any, keys: Sequence[Secret]) -> Any:
    """A JSON value without the keys in its texts. Names stay: calls are made by them."""
    if isinstance(value, str):
        for key in keys:
            value = value.replace(key.reveal(), "[key]")
        return value
    if isinstance(value, Mapping):
        return {name: without_keys(one, keys) for name, one in value.items()}
    return [without_keys(one, keys) for one in value] if isinstance(value, list) else value


def _is_text(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "text"


def _part(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(resource := block.get("resource"), Mapping):
        if isinstance(resource.get("text"), str):
            return f"{resource.get('uri', '')}\n{resource['text']}"
        return f"[not shown: {resource.get('uri', 'a resource')}, which is no text]"
    if kind == "resource_link":
        return f"[a link: {block.get('name', '')} {block.get('uri', '')}]"
    return f"[not shown: {'an' if kind in ('image', 'audio') else 'a part of type'} {kind}, as there is text only]"
