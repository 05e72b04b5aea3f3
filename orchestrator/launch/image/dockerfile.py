"""Reads a Dockerfile as far as its images go: which it needs, and the same file with others in their places. Pure.

What an instruction does is the builder's business. Followed here are, by the Dockerfile reference: lines that go
on, comments, here-documents, `# escape=`, and `ARG`s before the first `FROM`, whose names it may use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from orchestrator.errors import BuildError

_DIRECTIVE = re.compile(r"#\s*([a-z]+)\s*=\s*(\S+)\s*")
_WORD = re.compile(r"\s*([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_FROM = re.compile(r"((?:--\S+\s+)*)(\S+)(?:\s+AS\s+(\S+))?\s*", re.IGNORECASE)
_COPY_FROM = re.compile(r"(?<=--from=)\S+")
_ARGUMENT = re.compile(r"""([A-Za-z_]\w*)(?:=("[^"]*"|'[^']*'|\S*))?""")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::([-+])([^}]*))?\})")
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]{0,254}", re.ASCII)
_NO_IMAGE = "scratch"


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """`lines`: as they stand, an instruction each, comments too. `uses`: (its line, the image's name) of every
    image that is not made by a stage of its own. `roots`: the lines of FROM that do not go on with a stage."""

    lines: tuple[str, ...]
    uses: tuple[tuple[int, str], ...]
    roots: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Dockerfile:
        """Raises BuildError."""
        arguments: dict[str, str] = {}
        lines, uses = list[str](), list[tuple[int, str]]()
        roots, names, stages = list[int](), set[str](), 0
        for number, (word, rest, line) in enumerate(_instructions(text)):
            if word == "ARG" and not stages:
                arguments |= {
                    name: _filled(value.strip("\"'"), arguments) for name, value in _ARGUMENT.findall(rest)
                }
            elif word == "FROM":
                match = _FROM.fullmatch(rest)
                if match is None:
                    raise BuildError(f"its Dockerfile has a FROM that is not understood: {' '.join(line.split())}")
                options, image, name = match[1], _filled(match[2], arguments), match[3]
                if not image:
                    raise BuildError(f"its Dockerfile's `FROM {match[2]}` names no image: give the ARG a default")
                # Platforms by variable are BuildKit's; all that is built here is for this machine.
                options = "".join(f"{option} " for option in options.split() if "$" not in option)
                line = f"FROM {options}{image}{f' AS {name}' if name else ''}"
                if image.lower() not in names:
                    roots.append(number)
                    uses += [(number, image)] if image != _NO_IMAGE else []
                names |= {str(stages), (name or "").lower()}
                stages += 1
            elif word == "COPY" and (match := _COPY_FROM.search(rest)) and match[0].lower() not in names:
                uses.append((number, match[0]))
            lines.append(line)
        if not stages:
            raise BuildError("its Dockerfile has no FROM")
        for _, image in uses:  # no path: what looks images up would read files of this machine
            if not _IMAGE.fullmatch(image):
                raise BuildError(f"its Dockerfile begins with {ascii(image)[:100]}, which is no name of an image")
        return cls(tuple(lines), tuple(uses), tuple(roots))

    @property
    def images(self) -> tuple[str, ...]:
        """The names of the images that must be there, each once."""
        return tuple(dict.fromkeys(image for _, image in self.uses))

    def on(self, images: Mapping[str, str], first: str) -> str:
        """The same with these images in the places of its own, and with the instructions `first` behind each."""
        lines = list(self.lines)
        for number, image in self.uses:
            found = re.compile(rf"(?<![^\s=]){re.escape(image)}(?!\S)")
            lines[number] = found.sub(lambda _, name=images[image]: name, lines[number], count=1)  # type: ignore[misc]
        for number in self.roots:
            lines[number] += f"\n{first}"
        return "\n".join((*lines, ""))


def replacement(image: str, table: Mapping[str, str]) -> str:
    """The image that `table` names for this one, exactly or else without its digest; the image itself if it names
    none. `python:3.12`, `library/python:3.12` and `docker.io/library/python:3.12` are one name, and so are names
    without a tag and with `latest`."""
    plain = {_plain(name): other for name, other in table.items()}
    for name in (image, image.partition("@")[0]):
        if (other := plain.get(_plain(name))) is not None:
            return other
    return image


def _plain(image: str) -> str:
    name = image.removeprefix("index.").removeprefix("docker.io/").removeprefix("library/")
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def _filled(text: str, arguments: Mapping[str, str]) -> str:
    """The text with the values of its variables."""

    def value(match: re.Match[str]) -> str:
        known = arguments.get(match[1] or match[2], "")
        if match[3] == "+":
            return match[4] if known else ""
        return known or (match[4] or "")

    return _VARIABLE.sub(value, text)


def _instructions(text: str) -> Iterator[tuple[str, str, str]]:
    """(the first word in capitals, the rest with continued lines joined, the lines as they stand) of each
    instruction; comments and empty lines have no word."""
    lines = iter(text.removeprefix("\ufeff").splitlines())
    escape, directives = "\\", True
    for line in lines:
        directive = _DIRECTIVE.fullmatch(line.lower()) if directives else None
        directives = directive is not None
        if directive and directive[1] == "escape" and directive[2] in ("\\", "`"):
            escape = directive[2]
        if not line.strip() or line.lstrip().startswith("#"):
            yield "", "", line
            continue
        joined, whole = _joined(line, lines, escape)
        match = _WORD.match(joined)
        word, rest = (match[1].upper(), (match[2] or "").strip()) if match else ("", "")
        if word in ("RUN", "COPY", "ADD"):
            for here in _HEREDOC.finditer(rest):
                whole += _until(here[2], lines)
        # A rewritten line must be one line: `on` looks for the name in it.
        yield word, rest, f"{word} {rest}" if word == "COPY" and "--from=" in rest else "\n".join(whole)


def _joined(line: str, lines: Iterator[str], escape: str) -> tuple[str, list[str]]:
    joined, whole = "", [line]
    goes_on: Callable[[str], bool] = lambda text: text.rstrip(" \t").endswith(escape)  # noqa: E731
    while goes_on(line):
        joined += line.rstrip(" \t")[:-1]
        line = next(lines, "")
        whole.append(line)
        while (not line.strip() or line.lstrip().startswith("#")) and (following := next(lines, None)) is not None:
            line = following
            whole.append(line)
    return joined + line, whole


def _until(end: str, lines: Iterator[str]) -> list[str]:
    taken = []
    for line in lines:
        taken.append(line)
        if line.lstrip("\t") == end:
            break
    return taken
