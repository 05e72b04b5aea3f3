"""What of a Dockerfile is understood without an Engine, and that nothing else is passed over."""

from __future__ import annotations

import re

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.image.context import DOCKERFILE, BuildContext, context_root
from orchestrator.launch.oci.dockerfile import (
    Arg,
    Copy,
    CopyStage,
    EntryPoint,
    Env,
    From,
    Instruction,
    Label,
    Run,
    User,
    expand,
    parse,
)


def real() -> str:
    return BuildContext.read(context_root())[DOCKERFILE].decode()


def one(line: str) -> Instruction:
    """The only instruction after FROM."""
    return parse(f"FROM scratch\n{line}\n")[1].instruction


@pytest.mark.parametrize(
    ("line", "instruction"),
    [
        ("FROM debian:13", From("debian:13", None)),
        ("FROM ${BASE} AS files", From("${BASE}", "files")),
        ('ARG A B="" C=1', Arg({"A": None, "B": "", "C": "1"})),
        ('ENV A=1 B="two words"', Env({"A": "1", "B": "two words"})),
        ("ENV PATH=/a:${PATH}", Env({"PATH": "/a:${PATH}"})),
        ("LABEL a.b=${C}", Label({"a.b": "${C}"})),
        ("USER 0:0", User("0:0")),
        ("COPY a* b[c] /d/", Copy(("a*", "b[c]"), "/d/")),
        ("COPY --from=files / /", CopyStage("files")),
        ("RUN set -eu;  echo '$A' \"${B:-c}\"", Run("set -eu;  echo '$A' \"${B:-c}\"")),
        ('ENTRYPOINT ["/p", "-x"]', EntryPoint(("/p", "-x"))),
    ],
)
def test_a_known_form_is_understood(line: str, instruction: Instruction) -> None:
    assert one(line) == instruction


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("HEALTHCHECK NONE", "HEALTHCHECK: no such instruction"),
        ("run true", "run: no such instruction"),
        *(
            (f"{name} x", f"{name}: no such")
            for name in ("ADD", "CMD", "EXPOSE", "ONBUILD", "SHELL", "STOPSIGNAL")
        ),
        *((f"{name} x", f"{name}: no such") for name in ("VOLUME", "WORKDIR", "MAINTAINER", "nonsense")),
        ("FROM --platform=linux/amd64 x", "FROM: only"),
        ("FROM x as y", "FROM: only"),
        ("FROM", "FROM: only"),
        ("ARG 1=x", "1 is no name"),
        ("ENV A b", "only NAME=VALUE"),
        ("ENV", "only NAME=VALUE"),
        ("ENV =b", "nothing is no name"),
        ("ENV A='b'", "single quotes"),
        (r"ENV A=b\ c", "backslashes"),
        ("ENV A=$B", r"\$\{NAME\} alone"),
        ("ENV A=${B:-c}", r"\$\{NAME\} alone"),
        ('LABEL A="b', "No closing quotation"),
        ("USER 1000", "not as 1000"),
        ("COPY a b", "COPY: only"),
        ("COPY a /b", "COPY: only"),
        ("COPY /b/", "COPY: only"),
        ("COPY ../a /b/", "COPY: only"),
        ("COPY a /b/../c/", "COPY: only"),
        ("COPY --chown=1 a /b/", "COPY: only"),
        ("COPY --from=x /a /b", "COPY: only"),
        ('COPY ["a", "/b/"]', "COPY: only"),
        ("RUN", "RUN: only a script"),
        ("RUN --mount=type=cache,target=/x true", "RUN: only a script"),
        ('RUN ["true"]', "RUN: only a script"),
        ("RUN cat <<EOF", "RUN: only a script"),
        ("ENTRYPOINT /p", "ENTRYPOINT: only a JSON array"),
        ("ENTRYPOINT []", "ENTRYPOINT: only a JSON array"),
        ("ENTRYPOINT [1]", "ENTRYPOINT: only a JSON array"),
    ],
)
def test_anything_else_is_refused_by_line_and_name(line: str, complaint: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=rf"^Dockerfile, line 2, .*{complaint}"):
        one(line)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no FROM"),
        ("ARG A\n", "has no FROM"),
        ("RUN true\nFROM scratch\n", "line 1, RUN: it stands before FROM"),
        ("# escape=`\nFROM scratch\n", "line 1: no parser directive"),
        ("#Syntax = docker/dockerfile:1\nFROM scratch\n", "line 1: no parser directive"),
    ],
)
def test_a_file_that_means_something_else_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=complaint):
        parse(text)


def test_an_instruction_goes_on_over_comments_and_empty_lines() -> None:
    text = "# first\nFROM scratch\n\nRUN a 'b \\  \n  # don't\n\n    c'; \\\n    d\nRUN e"
    assert [step.instruction for step in parse(text)[1:]] == [Run("a 'b     c';     d"), Run("e")]


def test_a_step_is_shown_without_its_script() -> None:
    assert parse("FROM scratch\nRUN set -eu; \\\n  rm x\n")[1].shown == "RUN set -eu"


def test_variables_without_a_value_are_empty() -> None:
    assert expand("${A}-${B}", {"A": "1"}) == "1-"


# ---------------------------------------------------------------- the project's own


def test_every_line_of_our_dockerfile_is_part_of_a_step() -> None:
    """The parser sees all of it: what it read, with what it leaves out, is the file again."""
    read = "".join(
        re.sub(r"\\$", "", line)
        for line in real().splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    )
    names = [type(step.instruction).__name__ for step in parse(real())]
    assert len(names) == len(re.findall(r"^[A-Z]+ ", real(), re.MULTILINE))
    scripts = [step.instruction.script for step in parse(real()) if isinstance(step.instruction, Run)]
    assert scripts
    assert all(script in read for script in scripts)
    assert names.count("From") == 2
    assert names.count("CopyStage") == 1


@pytest.mark.parametrize("added", ["WORKDIR /x", "RUN --network=host true", "COPY --link a /b/"])
def test_what_is_added_to_our_dockerfile_is_known_or_refused(added: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=added.split()[0]):
        parse(f"{real()}\n{added}\n")
