"""`env.prompt_templates`: a YAML file of prompts to use instead of smolagents' own, all of them or some."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

FLAG = "env.prompt_templates"
MAX_BYTES = 256 * 1024
_TEAM = frozenset({"tools", "managed_agents"})
_CODE = frozenset({"authorized_imports", "code_block_opening_tag", "code_block_closing_tag"})
# The variables that smolagents gives each template. Any other name in a template would end every rollout.
_NAMES: Mapping[str, frozenset[str]] = {
    "system_prompt": _TEAM | _CODE | {"custom_instructions"},
    "planning.initial_plan": _TEAM | {"task"},
    "planning.update_plan_pre_messages": frozenset({"task"}),
    "planning.update_plan_post_messages": _TEAM | {"task", "remaining_steps"},
    "managed_agent.task": frozenset({"name", "task"}),
    "managed_agent.report": frozenset({"name", "final_answer"}),
    "final_answer.pre_messages": frozenset(),
    "final_answer.post_messages": frozenset({"task"}),
}


def read_templates(path: Path, kind: str) -> Mapping[str, Any]:
    """The templates of the file, nested as smolagents nests them. Raises ConfigError."""
    import yaml

    try:
        content = path.read_bytes()
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{FLAG}: {path} is longer than {MAX_BYTES} bytes")
        document = yaml.safe_load(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{FLAG}: cannot read {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{FLAG}: {path} is no valid YAML at line {line}") from None
    except (ValueError, LookupError, AttributeError, OverflowError, yaml.YAMLError, RecursionError):
        raise ConfigError(f"{FLAG}: {path} is no YAML text in UTF-8") from None
    flat = _flat(document, path)
    for name, text in flat.items():
        _check(name, text, kind, path)
    return document if isinstance(document, dict) else {}


def _flat(document: object, path: Path) -> dict[str, object]:
    if not isinstance(document, dict) or not document:
        raise ConfigError(f"{FLAG}: {path} must hold a mapping with some of {', '.join(_NAMES)}")
    flat: dict[str, object] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{part}": text for part, text in value.items()}
        else:
            flat[str(key)] = value
    return flat


def _check(name: str, text: object, kind: str, path: Path) -> None:
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_undeclared_variables

    if name not in _NAMES:
        raise ConfigError(f"{FLAG}: {path} has {name!r}; there are {', '.join(_NAMES)}")
    if not isinstance(text, str):
        raise ConfigError(f"{FLAG}: {path}: {name} must be text")
    variables = _NAMES[name] - (_CODE if kind != "code" else frozenset())
    try:
        used = find_undeclared_variables(Environment(autoescape=False).parse(text))  # noqa: S701  prompts, not pages
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"{FLAG}: {path}: {name}: {error}") from None
    if unknown := sorted(used - variables):
        raise ConfigError(
            f"{FLAG}: {path}: {name} uses {', '.join(unknown)}; it is given "
            f"{', '.join(sorted(variables)) or 'no variables'}"
        )
