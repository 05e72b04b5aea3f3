"""Makes the example tasks: questions, attachments and the answers, computed from the same random data.

    python examples/generate.py                  writes tasks.jsonl and files/
    python examples/generate.py --reasoning-gym  writes reasoning_gym.jsonl (needs that package)

The same bytes every time, on every machine. Standard library only, but for the second command.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

from recipes import EXAMPLES

SEED = 20_279

REASONING_GYM_SEED = 20_260
# Data sets of reasoning-gym whose answers are one exact text, by the level given to them here.
REASONING_GYM = {
    1: ("chain_sum", "letter_counting", "spell_backward", "gcd", "lcm", "products"),
    2: ("count_primes", "count_bits", "base_conversion", "leg_counting", "basic_arithmetic"),
    3: ("number_sorting", "word_sorting"),
}


def write_tasks(folder: Path) -> None:
    """Writes tasks.jsonl and, anew, the folder files/."""
    files = folder / "files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    rows = []
    for make in EXAMPLES:
        name = make.__name__.replace("_", "-")
        example = make(random.Random(f"{SEED}/{name}"))  # noqa: S311 - reproducible on purpose
        for file, content in example.files.items():
            with (files / file).open("xb") as out:  # x: names are unique over all tasks
                out.write(content.encode() if isinstance(content, str) else content)
        rows.append(
            {
                "task_id": f"example-{name}",
                "question": example.question,
                "answer": str(example.answer),
                "level": example.level,
                "files": [f"files/{file}" for file in example.files],
                "metadata": {"source": "examples", "kind": name.split("-")[0]},
            }
        )
    _write_jsonl(folder / "tasks.jsonl", rows)


def write_reasoning_gym(folder: Path) -> None:
    """Writes reasoning_gym.jsonl, one question of each data set. The package's version is part of the result."""
    import reasoning_gym  # type: ignore[import-not-found, unused-ignore]

    rows = []
    for level, name in ((level, name) for level, names in REASONING_GYM.items() for name in names):
        entry = reasoning_gym.create_dataset(name, seed=REASONING_GYM_SEED, size=1)[0]
        rows.append(
            {
                "task_id": f"{name}/{REASONING_GYM_SEED}/0",
                "question": entry["question"],
                "answer": entry["answer"],
                "level": level,
                "files": [],
                "metadata": {"source": "reasoning_gym", "kind": name},
            }
        )
    _write_jsonl(folder / "reasoning_gym.jsonl", rows)


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reasoning-gym", action="store_true", help="write reasoning_gym.jsonl instead")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent, help="where to write")
    options = parser.parse_args()
    (write_reasoning_gym if options.reasoning_gym else write_tasks)(options.directory)
