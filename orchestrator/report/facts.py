"""What a run.json says of its run, as the report shows it. The file is anybody's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.run.lenient import mapping, objects, text
from orchestrator.types import EndedName, FailedName


def outcome_kinds() -> dict[str, str]:
    """Outcome → `ended` (the policy's doing, scored) or `failed` (not the policy's doing)."""
    return dict.fromkeys(map(str, EndedName), "ended") | dict.fromkeys(map(str, FailedName), "failed")


def facts_of(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values, for people."""
    config = mapping(description.get("config"))
    env, openai = mapping(config.get("env")), config.get("openai")
    server = (objects(openai) or [mapping(openai)])[0]
    sandbox = mapping(description.get("sandbox"))
    facts: list[tuple[str, object]] = [
        ("model", server.get("model_name")),
        ("endpoint", _host(text(server.get("base_url")))),
        ("tasks", description.get("tasks") or env.get("dataset")),
        ("group size", env.get("group_size")),
        ("seed", description.get("seed")),
        ("temperature", env.get("temperature")),
        ("max steps", env.get("max_steps")),
        ("scoring", env.get("scoring_strategy")),
        ("token ids", _token_ids(description)),
        ("docker", sandbox.get("docker")),
        ("isolation", sandbox.get("isolation") or sandbox.get("runtime")),
        ("image", sandbox.get("image")),
        ("image id", text(sandbox.get("image_id"), 200).removeprefix("sha256:")[:12]),
        ("version", description.get("version")),
    ]
    return [(text(name, 40), text(value, 200)) for name, value in facts if value not in (None, "")]


def _token_ids(description: Mapping[str, Any]) -> object:
    """Whether they are the sampled ones, and if not, why not."""
    why = text(description.get("why_text"), 150)
    return f"{text(description.get('token_ids'), 40)}: {why}" if why else description.get("token_ids")


def _host(base_url: str) -> str:
    """Host and port of the endpoint, without credentials and query; for a replay the name of the recording."""
    if base_url.startswith("replay:"):
        return f"replay of {Path(base_url).name}"
    try:
        parts = urlsplit(base_url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    return f"{parts.hostname}{port}" if parts.hostname else ""
