"""Dockerfiles of tasks: the images they begin with, the same text on others, and the folders of builds."""

from __future__ import annotations

import io
import os
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import BuildError, ConfigError
from orchestrator.launch.image import task_context
from orchestrator.launch.image.dockerfile import Dockerfile, replacement
from orchestrator.launch.image.site import Site
from orchestrator.launch.image.task_context import IGNORE_FILE, REWRITTEN, TaskContext
from orchestrator.launch.image.task_images import failed_step
from orchestrator.settings.sources import load_config
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Task

DIGEST = "sha256:" + "a" * 64

# ---------------------------------------------------------------- the text


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("FROM a\n", ("a",)),
        ("# FROM b\n\nfrom a:1\nRUN echo FROM c\n", ("a:1",)),
        ("FROM a AS one\nFROM one\nCOPY --from=one /x /y\nCOPY --from=0 a b\nCOPY --from=c:2 a b\n", ("a", "c:2")),
        ("FROM a AS One\nFROM oNE\n", ("a",)),
        ("ARG V=3.12\nARG N=python:${V}\nFROM $N-slim\n", ("python:3.12-slim",)),
        ('ARG A="x" B=\nFROM ${A}${B:-y}${A:+z}${C}\n', ("xyz",)),
        ("FROM a\nARG V=1\nRUN x\nFROM scratch\nCOPY --from=0 / /\n", ("a",)),
        ("FROM --platform=$BUILDPLATFORM a\nFROM --platform=linux/amd64 b@" + DIGEST, ("a", f"b@{DIGEST}")),
        ("FROM \\\n  # why\n\n  a \\\n AS one\nFROM b\n", ("a", "b")),
        ("# escape=`\nFROM `\na\nRUN dir \\\nFROM b\n", ("a", "b")),
        ("# syntax=x\nFROM a\nRUN <<-'EOT' sh\nFROM b\n\tEOT\nFROM c\n", ("a", "c")),
        ("FROM a\nCOPY <<ONE <<TWO /x/\nFROM c\nONE\nFROM d\nTWO\nFROM e\n", ("a", "e")),
        ("\ufeffFROM a\r\nRUN x\r\n", ("a",)),
        ("FROM a\nCOPY --chown=0:0 --from=c \\\n /x /y\n", ("a", "c")),
    ],
)  # fmt: skip
def test_the_images_a_dockerfile_begins_with_are_known(text: str, images: tuple[str, ...]) -> None:
    assert Dockerfile.parse(text).images == images


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "its Dockerfile has no FROM"),
        ("RUN x\n", "its Dockerfile has no FROM"),
        ("FROM\n", "its Dockerfile has a FROM that is not understood: FROM"),
        ("FROM a b c d\n", "its Dockerfile has a FROM that is not understood: FROM a b c d"),
        ("FROM /etc/passwd\n", "its Dockerfile begins with '/etc/passwd', which is no name of an image"),
        ("FROM a\nCOPY --from=../x y z", "its Dockerfile begins with '../x', which is no name of an image"),
        ("ARG V\nFROM $V\n", "its Dockerfile's `FROM $V` names no image: give the ARG a default"),
    ],
)
def test_a_dockerfile_without_an_image_is_refused(text: str, why: str) -> None:
    with pytest.raises(BuildError) as refusal:
        Dockerfile.parse(text)
    assert str(refusal.value) == why


def test_images_are_replaced_where_they_are_named_and_nowhere_else() -> None:
    text = (
        "ARG V=1\nFROM --platform=linux/amd64 py:$V AS py\nRUN echo py:1 \\\n  py:1\n"
        "FROM py\nCOPY --chown=1 --from=py:1 py:1 /x\nCOPY --from=py /a /b\n"
    )
    assert Dockerfile.parse(text).on({"py:1": "mine"}, "LABEL a=b") == (
        "ARG V=1\nFROM --platform=linux/amd64 mine AS py\nLABEL a=b\nRUN echo py:1 \\\n  py:1\n"
        "FROM py\nCOPY --chown=1 --from=mine py:1 /x\nCOPY --from=py /a /b\n"
    )


@pytest.mark.parametrize(
    ("image", "other"),
    [
        ("python:3.12-slim", "tag"),
        (f"python:3.12-slim@{DIGEST}", "exact"),
        ("python:3.12-slim@sha256:" + "b" * 64, "tag"),
        ("docker.io/library/python:3.12-slim", "tag"),
        ("index.docker.io/library/busybox", "latest"),
        ("busybox:latest", "latest"),
        ("busybox@sha256:" + "b" * 64, "latest"),
        ("registry:5000/busybox", "registry:5000/busybox"),
        ("python", "python"),
    ],
)
def test_a_name_is_replaced_exactly_or_else_without_its_digest(image: str, other: str) -> None:
    table = {"python:3.12-slim": "tag", f"python:3.12-slim@{DIGEST}": "exact", "docker.io/busybox": "latest"}
    assert replacement(image, table) == other


@pytest.mark.parametrize(
    ("given", "table"),
    [
        (
            "python:3.12-slim=mine, a/b@sha256:c = r:5000/x",
            {"python:3.12-slim": "mine", "a/b@sha256:c": "r:5000/x"},
        ),
        ('{"a": "b"}', {"a": "b"}),
        ({"a": "b"}, {"a": "b"}),
    ],
)
def test_base_images_are_named_in_pairs_or_as_an_object(given: object, table: dict[str, str]) -> None:
    assert load_config(env={"base_images": given}, environ={}).env.base_images == table


@pytest.mark.parametrize("given", ["a", "a=", "=b", "a=b,a=c", "a=b,,", "a=b c", "{}", '{"a": 1}', "[]"])
def test_what_names_no_base_image_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.base_images: must be NAME=IMAGE,NAME=IMAGE or a JSON object"):
        load_config(env={"base_images": given}, environ={})


# ---------------------------------------------------------------- rows


def test_a_row_names_a_dockerfile_or_its_folder(tmp_path: Path) -> None:
    for name in ("a/Dockerfile", "a/b/Dockerfile.dev"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("FROM a")
    for given, path in (("a", "a/Dockerfile"), ("./a/", "a/Dockerfile"), ("a/b/Dockerfile.dev",) * 2):
        task = made(tmp_path, given)
        assert isinstance(task, Task)
        assert task.dockerfile == str(tmp_path / path)
    assert made(tmp_path, None) == replace(task, dockerfile=None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (7, "dockerfile must be the name of a file or folder, not int"),
        ("nowhere", "dockerfile 'nowhere' is not beside the dataset"),
        ("empty", "dockerfile 'empty/Dockerfile' is not beside the dataset"),
        ("out", "dockerfile 'out' leads out of the dataset's folder"),
        ("../nobody-has-it", "dockerfile '../nobody-has-it' is not beside the dataset"),
        (".", "dockerfile '.' lies beside the tasks and their answers: give it a folder"),
        ("Dockerfile", "dockerfile 'Dockerfile' lies beside the tasks and their answers: give it a folder"),
    ],
)
def test_a_dockerfile_that_cannot_be_meant_is_a_bad_task(tmp_path: Path, given: object, why: str) -> None:
    (tmp_path / "Dockerfile").write_text("FROM a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to("/etc")
    assert made(tmp_path, given) == BadTask("t", why)


def test_a_row_has_an_image_or_a_dockerfile(tmp_path: Path) -> None:
    why = "image and dockerfile both say what the sandbox is made of: leave one out"
    assert made(tmp_path, "a", image="x") == BadTask("t", why)
    assert made(None, "a") == BadTask(
        "t", "the row's dockerfile is a file, and this kind of dataset has no folder to find it in"
    )


def made(root: Path | None, dockerfile: object, **more: object) -> Task | BadTask:
    row = {"task_id": "t", "question": "?!", "answer": "42", "dockerfile": dockerfile, **more}
    return make_task(row, source="s", place="line 1", root=root)


# ---------------------------------------------------------------- the folder


def pack(folder: Path) -> tuple[TaskContext, dict[str, tarfile.TarInfo], dict[str, bytes]]:
    out = io.BytesIO()
    context = TaskContext.pack(folder / "Dockerfile", out, lambda dockerfile: "FROM mine\n")
    with tarfile.open(fileobj=out) as tar:
        entries = {entry.name: entry for entry in tar}
        return context, entries, {name: tar.extractfile(e).read() for name, e in entries.items() if e.isreg()}  # type: ignore[union-attr]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Dockerfile").write_text("FROM a\nCOPY . /\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("print()")
    (tmp_path / "run.sh").write_text("#!/bin/sh")
    (tmp_path / "run.sh").chmod(0o775)
    (tmp_path / "link").symlink_to("src/main.py")
    return tmp_path


def test_a_context_has_all_files_and_the_dockerfile_that_is_carried_out(folder: Path) -> None:
    context, entries, contents = pack(folder)
    assert context.dockerfile.images == ("a",)
    assert set(entries) == {"Dockerfile", "src", "src/main.py", "run.sh", "link", IGNORE_FILE, REWRITTEN}
    assert contents["Dockerfile"] == b"FROM a\nCOPY . /\n"
    assert contents[REWRITTEN] == b"FROM mine\n"
    assert contents[IGNORE_FILE].split() == [IGNORE_FILE.encode(), REWRITTEN.encode()]  # as if neither were there
    assert (entries["run.sh"].mode, entries["src/main.py"].mode, entries["link"].linkname) == (
        0o755, 0o644, "src/main.py",
    )  # fmt: skip


def test_the_digest_follows_content_and_not_times_owners_or_masks(folder: Path) -> None:
    first = pack(folder)[0].digest
    os.utime(folder / "run.sh", (1, 1))
    (folder / "src" / "main.py").chmod(0o600)
    assert pack(folder)[0].digest == first
    changes = [
        lambda: (folder / "src" / "main.py").write_text("print(1)"),
        lambda: (folder / "run.sh").chmod(0o644),
        lambda: (folder / "run.sh").rename(folder / "go.sh"),
        lambda: ((folder / "link").unlink(), (folder / "link").symlink_to("go.sh")),
        lambda: (folder / IGNORE_FILE).write_text("go.sh"),
        lambda: (folder / "empty").mkdir(),
    ]
    digests = [first]
    for change in changes:
        change()
        digests.append(pack(folder)[0].digest)
    assert len(set(digests)) == len(digests)


def test_what_is_ignored_is_not_even_looked_at(folder: Path) -> None:
    (folder / "secret").symlink_to("/etc/passwd")
    (folder / "deep").mkdir()
    os.mkfifo(folder / "deep" / "pipe")
    (folder / "deep" / "kept").write_text("x")
    (folder / IGNORE_FILE).write_text("# none of these\nsecret\n*.sh\ndeep\n!deep/kept\n")
    _, entries, contents = pack(folder)
    assert set(entries) == {
        "Dockerfile", "src", "src/main.py", "deep/kept", "link", IGNORE_FILE, REWRITTEN,
    }  # fmt: skip
    assert contents[IGNORE_FILE].endswith(f"!deep/kept\n\n{REWRITTEN}\n".encode())


def _link(folder: Path, target: str) -> None:
    (folder / "src" / "out").symlink_to(target)


def test_lines_with_many_stars_are_matched_in_little_time(folder: Path) -> None:
    for name in ("a" * 200, "deep/x/kept", "deep/x/logs/b.c.log", "deep/logs.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    lines = ("*a" * 30 + "b", "**/a/" * 30 + "b", "**/l*g*/**/*.*.LOG", "deep/*/**/*e*t")
    (folder / IGNORE_FILE).write_text("\n".join(lines))
    begun = time.process_time()
    entries = pack(folder)[1]
    assert time.process_time() - begun < 1.0
    assert {"a" * 200, "deep/logs.log", "deep/x", "deep/x/logs"} <= set(entries)
    assert not {"deep/x/kept", "deep/x/logs/b.c.log"} & set(entries)


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lambda f: _link(f, "/etc/passwd"), "has a link that leads out of it, src/out: leave it out"),
        (lambda f: _link(f, "../../x"), "has a link that leads out of it, src/out: leave it out"),
        (lambda f: os.mkfifo(f / "src" / "pipe"), "no file, folder or link called src/pipe"),
        (lambda f: (f / "big").open("wb").truncate(3 << 30), "more than 1024 MiB or 200 files"),
        (lambda f: [(f / f"f{n}").touch() for n in range(201)], "more than 1024 MiB or 200 files"),
        (lambda f: (f / "/".join("d" * 70)).mkdir(parents=True), "more than 64 folders deep"),
        (lambda f: (f / IGNORE_FILE).write_text("x\n" * 1001), "its .dockerignore has more than 1000 lines"),
        (lambda f: (f / IGNORE_FILE).write_text("[z-a]"), "the line [z-a], which is not understood: bad char"),
        (lambda f: (f / IGNORE_FILE).write_text("*a*b**c"), "the line *a*b**c, with too many `*`: write `**`"),
        (lambda f: (f / IGNORE_FILE).symlink_to("/etc/passwd"), "cannot be read: .dockerignore: Too many levels"),
        (lambda f: (f / "Dockerfile").write_text("#" * (1 << 20) + "\n"), "its Dockerfile has more than 1 MiB"),
        (lambda f: (f / "Dockerfile").unlink(), "its Dockerfile is not there any more"),
        (lambda f: ((f / "Dockerfile").unlink(), os.mkfifo(f / "Dockerfile")), "its Dockerfile is not a file"),
        (lambda f: (f / "a\x1b[31m").symlink_to("/"), "a link that leads out of it, a?[31m"),
    ],
)  # fmt: skip
def test_a_hostile_context_is_refused_in_one_line(
    folder: Path, plant: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_context, "MAX_FILES", 200)
    plant(folder)  # type: ignore[operator]
    with pytest.raises(BuildError) as refusal:
        pack(folder)
    assert why in str(refusal.value)
    assert str(refusal.value).isprintable()


def test_a_link_that_stays_inside_is_taken_as_a_link(folder: Path) -> None:
    _link(folder, "../link")
    assert pack(folder)[1]["src/out"].linkname == "../link"


# ---------------------------------------------------------------- what is told, and handed over


def test_of_a_failed_step_the_last_lines_are_told_in_one_printable_line() -> None:
    output = [f"line {n}" for n in range(9)] + ["\x1b[31mred\x00", "", "at http://me:secret@proxy:1/ " + "x" * 500]
    text = str(failed_step("RUN  make\n all", "exit code 2", output))
    assert text.startswith("its Dockerfile fails at `RUN make all` (exit code 2): line 6 | line 7 | line 8 |")
    assert text.isprintable()
    assert "secret" not in text
    assert len(text) < 700


def test_a_site_is_what_the_usual_variables_say() -> None:
    site = Site.of({"HTTP_PROXY": "http://p:1", "no_proxy": "x", "PIP_CERT": "/ca.pem", "OPENAI_API_KEY": "k"})
    assert site == Site({"HTTP_PROXY": "http://p:1", "no_proxy": "x"}, Path("/ca.pem"), ("PIP_CERT",))
    assert Site.of({}) == Site({}, None, ())
