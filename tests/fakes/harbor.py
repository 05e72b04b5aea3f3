"""Folders of Harbor's tasks, for tests."""

from __future__ import annotations

from pathlib import Path

TOML = 'schema_version = "1.4"\n'


def a_task(folder: Path, toml: str = TOML, **files: str | None) -> Path:
    """The smallest task that can be run. `files`: more, or others, by their paths, with `__` for a slash and `_`
    for a dot: `environment__Dockerfile`; None: without it."""
    texts: dict[str, str | None] = {
        "task.toml": toml,
        "instruction.md": "Make it work.\n",
        "environment/Dockerfile": "FROM busybox\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "true\n",
    }
    texts |= {name.replace("__", "/").replace("_", "."): text for name, text in files.items()}
    for name, text in texts.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
    return folder
