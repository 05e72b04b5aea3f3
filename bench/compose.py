"""Counts which compose files are understood, and what the others lack, by name.

    python -m bench.compose ARCHIVE_OR_FOLDER

Of a package's wheel or sdist, or of a folder: each file whose name has `compose` in it. The agent's service is the
one that Inspect would take: `default`, or the one that says `x-default`, or the first.
"""

from __future__ import annotations

import posixpath
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import yaml

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.harbor.compose import read_compose
from orchestrator.tasks.harbor.refusal import Refusal


def main(place: str) -> None:
    """Prints the counts."""
    texts = files(Path(place))
    found = sorted(name for name in texts if is_compose(name))
    missing: Counter[str] = Counter()
    services: Counter[int] = Counter()
    odd = []
    for name in found:
        try:
            read = read_compose(
                texts[name].decode(),
                name,
                lambda one: _text(texts, one),
                texts.__contains__,
                main=agents(name, texts),
            )
            services[len(read.services)] += 1
        except Refusal as error:
            missing[error.need] += 1
        except (BadRow, UnicodeDecodeError) as error:
            missing["(it cannot be read)"] += 1
            odd.append(f"  {name}: {error}")
    print(f"{services.total()} of {len(found)} compose files are understood")
    print(
        ", ".join(f"{count} with {number} services beside the agent" for number, count in sorted(services.items()))
    )
    for need, count in missing.most_common():
        print(f"{count:4} need {need}")
    print("\n".join(odd))


def files(place: Path) -> Mapping[str, bytes]:
    """The content of each by its path."""
    if place.is_dir():
        return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    if zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(place) as tar:
        return {one.name: (tar.extractfile(one) or sys.stdin.buffer).read() for one in tar if one.isfile()}


def is_compose(name: str) -> bool:
    """By its own name."""
    own = posixpath.basename(name).lower()
    return "compose" in own and own.endswith((".yaml", ".yml"))


def agents(name: str, texts: Mapping[str, bytes]) -> str:
    """The name of the agent's service."""
    document = yaml.safe_load(texts[name])
    named = document.get("services") or {} if isinstance(document, dict) else {}
    marked = [one for one, fields in named.items() if isinstance(fields, dict) and fields.get("x-default")]
    return "default" if "default" in named else next(iter((*marked, *named)), "default")


def _text(texts: Mapping[str, bytes], name: str) -> str | None:
    return texts[name].decode() if name in texts else None


if __name__ == "__main__":
    main(sys.argv[1])
