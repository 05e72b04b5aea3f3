"""Makes a Harbor task of each repository's archive: `python -m bench.repo_tasks ARCHIVE... --out FOLDER`.

Archives are sdists of PyPI, or others that bench/repo_tasks.toml says how to test. Bugs are tried in Docker
without a network, until one makes a test fail that passed before, and leaves most of them. The task is to find it:
the agent gets the repository without its tests, which lie where only the grader has them.
"""

import argparse
import difflib
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.repo_bugs import bugs

RECIPES = Path(__file__).with_suffix(".toml")
RUNS = 4  # of the tests, before anything is changed
TRIES = 60
MOST_FAIL = 20
OTHER_FILES, OTHER_TESTS = 3, 30  # that are run beside those that fail: of pytest, or of a recipe without files
LIMIT_S = 120  # of all tests of a repository; of a task's, test.sh has less, so that it says itself what hangs
TEST_SH = """\
#!/bin/sh
# All of /tests/expected have to be printed by what runs the tests: an exit code says nothing.
printed=$(APP=/app TESTS=/tests/repo timeout 100 sh /tests/run.sh $(cat /tests/files) 2>&1)
printf '%s\\n' "$printed"
passed=$(printf '%s\\n' "$printed" | grep -xFf /tests/expected | sort -u | wc -l)
[ "$passed" -eq "$(wc -l < /tests/expected)" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Recipe:
    """How a repository is tested, as bench/repo_tasks.toml says."""

    image: str
    sources: list[str]
    tests: list[str]
    run: str
    user: str = "root"


class Repository(NamedTuple):
    """Unpacked: without its tests, and these alone."""

    name: str
    app: Path
    tests: Path


@dataclass
class Printed:
    """Of one run: the tests that passed; of those that failed, why, if it is known."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


# A recipe, a repository, files of tests (none: all) → what the tests print.
Run = Callable[[Recipe, Repository, Sequence[str]], str]


def in_docker(recipe: Recipe, repository: Repository, files: Sequence[str]) -> str:
    mounts = ["-v", f"{repository.app}:/app:ro", "-v", f"{repository.tests}:/tests/repo:ro"]
    places = ["-e", "APP=/app", "-e", "TESTS=/tests/repo", "-e", "PYTHONDONTWRITEBYTECODE=1"]
    argv = ["docker", "run", "--rm", "--network=none", "--memory=1g", *mounts, *places, recipe.image]
    argv += ["timeout", str(LIMIT_S), "sh", "-c", recipe.run, "sh", *files]
    return subprocess.run(argv, capture_output=True, check=False).stdout.decode(errors="replace")


def read(printed: str) -> Printed:
    found = Printed()
    for line in printed.splitlines():
        outcome, _, rest = line.partition(" ")
        name, _, why = rest.partition(" - ")
        if outcome == "PASSED":
            found.passed.add(rest)
        elif outcome == "FAILED":
            found.failed[name] = why
    return found


def unpacked(archive: Path, recipe: Recipe, place: Path) -> Repository:
    with tarfile.open(archive) as tar:
        tar.extractall(place, filter="data")
    (whole,) = place.iterdir()
    name = whole.name
    app, tests = whole.rename(place / "app"), place / "tests"
    for path in sorted({path for pattern in recipe.tests for path in app.glob(pattern) if path.is_file()}):
        target = tests / path.relative_to(app)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    for folder in sorted((path for path in app.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    return Repository(name, app, tests)


def make_task(archive: Path, out: Path, recipe: Recipe, run: Run = in_docker) -> str:
    """What became of it, in words. Raises ValueError where no task comes of it."""
    with tempfile.TemporaryDirectory() as folder:
        repository = unpacked(archive, recipe, Path(folder))
        # Names may be drawn anew in each run: pytest's, where the cases are a set.
        usual = set.intersection(*(read(run(recipe, repository, ())).passed for _ in range(RUNS)))
        if len(usual) < 2:
            raise ValueError(f"{len(usual)} of its tests pass")
        sources = {path for pattern in recipe.sources for path in repository.app.glob(pattern) if path.is_file()}
        found = [(path, bug) for path in sorted(sources) for bug in bugs(path, path.read_text())]
        random.Random(repository.name).shuffle(found)  # the same task each time
        for tries, (path, bug) in enumerate(found[:TRIES], 1):
            right = path.read_text()
            path.write_text(bug.text)
            printed = read(run(recipe, repository, ()))
            broken = sorted(usual - printed.passed)
            if 0 < len(broken) <= min(MOST_FAIL, len(usual) // 2):
                name = path.relative_to(repository.app)
                patch = "".join(_difference(bug.text, right, str(name)))
                _write(out / repository.name, recipe, repository, usual, broken, printed.failed, patch, bug.kind)
                return f"{repository.name}: {bug.kind} in {name}, {len(broken)} of {len(usual)} fail, try {tries}"
            path.write_text(right)
    raise ValueError(f"none of {min(TRIES, len(found))} bugs does")


def _difference(old: str, new: str, name: str) -> list[str]:
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    return list(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))


def _write(
    task: Path,
    recipe: Recipe,
    repository: Repository,
    usual: set[str],
    broken: list[str],
    why: dict[str, str],
    patch: str,
    kind: str,
) -> None:
    if task.exists():
        shutil.rmtree(task)
    of_broken = {name.partition("::")[0] for name in broken}
    others = sorted({name.partition("::")[0] for name in usual} - of_broken)
    files = [*sorted(of_broken), *others[: OTHER_FILES if "::" in broken[0] else OTHER_TESTS]]
    expected = sorted(name for name in usual if name.partition("::")[0] in files)
    shown = "\n".join(f"    {name}{': ' + why[name][:300] if why.get(name) else ''}" for name in broken[:5])
    image = f"FROM {recipe.image}\nCOPY --chown={recipe.user} repo /app\nWORKDIR /app\nUSER {recipe.user}\n"
    texts = {
        "task.toml": f"""\
schema_version = "1.4"
artifacts = ["/app"]

[task]
name = "repositories/{repository.name}"

[metadata]
difficulty = "medium"
category = "bug fix"
tags = ["{kind}", "{recipe.image}", "{recipe.user}"]

[agent]
timeout_sec = 600

[verifier]
timeout_sec = {LIMIT_S}

[environment]
memory_mb = 1024
network_mode = "no-network"
""",
        "instruction.md": f"""\
In `/app` lies the source of {repository.name}. One place in its code was changed, and since then it does not work
as it should. Its tests are not here. {len(broken)} of them fail now, among them

{shown}

Find the place and mend it. All other tests must pass as before.
""",
        "environment/Dockerfile": image,
        "tests/test.sh": TEST_SH,
        "tests/run.sh": recipe.run,
        "tests/files": "".join(f"{name}\n" for name in files),
        "tests/expected": "".join(f"PASSED {name}\n" for name in expected),
        "solution/solve.sh": f"#!/bin/sh\nset -eu\ncd /app\npatch -p1 <<'PATCH'\n{patch}PATCH\n",
    }
    for name, text in texts.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    shutil.copytree(repository.app, task / "environment/repo", symlinks=True)
    shutil.copytree(repository.tests, task / "tests/repo", symlinks=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.repo_tasks", description=__doc__.split("\n")[0])
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    given = parser.parse_args(arguments)
    recipes = tomllib.loads(RECIPES.read_text())
    made = 0
    for archive in given.archives:
        own: dict[str, Any] = next(
            (recipes[name] for name in recipes if archive.name.lower().startswith(name)), {}
        )
        try:
            print(make_task(archive, given.out, Recipe(**{**recipes["python"], **own})), flush=True)
            made += 1
        except (ValueError, OSError, tarfile.TarError) as error:
            print(f"{archive.name}: no task: {error}", file=sys.stderr, flush=True)
    return int(made < len(given.archives))


if __name__ == "__main__":
    sys.exit(main())
