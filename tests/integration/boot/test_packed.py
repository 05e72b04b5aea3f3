"""Modules out of one file: as they are without it, and only while the file fits what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.boot.packed import _folders
from tests.fakes.runs import ROOT

PACK = """
import sys
sys.path.insert(0, {folder!r})
from sandbox.boot.compiled import recording
from sandbox.boot.packed import Absent, pack
with recording() as compiled, Absent() as absent:
    import whole.part, spread.inner
pack({file!r}, compiled, absent)
"""
USE = """
import sys
sys.path.insert(0, {folder!r})
from sandbox.boot.packed import PackedImports
finders = list(sys.meta_path)
with PackedImports({file!r}):
    import whole.part
assert sys.meta_path == finders
import inspect, importlib.resources
print(whole.part.VALUE, type(whole.part.__spec__.loader).__name__, whole.__path__ == [{folder!r} + "/whole"])
print(whole.part.__file__ == {folder!r} + "/whole/part.py", inspect.getsource(whole.part.named).strip())
data = importlib.resources.files("whole").joinpath("data.txt").read_text()
print(data, type(importlib.reload(whole.part)).__name__)
"""


def run(code: str, folder: Path) -> list[str]:
    given = {"folder": str(folder / "lib"), "file": str(folder / "modules.packed")}
    done = subprocess.run(
        [sys.executable, "-c", code.format(**given)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder with a package in `lib` and a file it was packed into."""
    package = tmp_path / "lib" / "whole"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "data.txt").write_text("as it is")
    (package / "part.py").write_text(
        "try:\n    import optional\nexcept ImportError:\n    optional = None\n"
        "VALUE = 1\n\n\ndef named(): return VALUE\n"
    )
    (tmp_path / "lib" / "spread").mkdir()
    (tmp_path / "lib" / "spread" / "inner.py").write_text("INNER = 1\n")
    run(PACK, tmp_path)
    return tmp_path


def test_packed_modules_are_those_that_were_packed(packed: Path) -> None:
    part = packed / "lib" / "whole" / "part.py"
    part.write_text(part.read_text().replace("VALUE = 1", "VALUE = 2"))  # not where the pack looks
    assert run(USE, packed) == [
        "1 SourceFileLoader True",
        "True def named(): return VALUE",
        "as it is module",
    ]


def test_packages_without_a_module_and_modules_that_are_not_there_need_no_look_at_a_folder(packed: Path) -> None:
    lines = """
import sys
sys.path.insert(0, {folder!r})
from sandbox.boot.packed import PackedImports
def listed(path):
    if path == {folder!r}:
        raise AssertionError("looked into")
    raise ImportError
with PackedImports({file!r}):
    sys.path_hooks.insert(0, listed)
    import whole.part, spread.inner
    del sys.path_hooks[0]
    import importlib.util
    print(whole.part.optional, spread.inner.INNER, importlib.util.find_spec("optional"), list(spread.__path__))
sys.path.append({file!r} + ".more")
import spread.other
print(spread.other.OTHER)
"""
    other = packed / "modules.packed.more" / "spread"
    other.mkdir(parents=True)
    (other / "other.py").write_text("OTHER = 2\n")
    assert run(lines, packed) == [f"None 1 None ['{packed}/lib/spread']", "2"]


def test_what_was_installed_after_it_is_not_hidden(packed: Path) -> None:
    part = packed / "lib" / "whole" / "part.py"
    part.write_text(part.read_text().replace("VALUE = 1", "VALUE = 2"))
    os.utime(part, (1, 1))  # Python knows a change by size and second
    os.utime(packed / "lib", (1, 1))  # as if something had come or gone in it
    assert run(USE, packed)[0] == "2 SourceFileLoader True"


def test_a_folder_that_is_gone_costs_no_start(packed: Path) -> None:
    (packed / "lib").rename(packed / "moved")
    without = (
        USE.split("with PackedImports")[0] + "with PackedImports({file!r}):\n    import json\nprint('started')"
    )
    assert run(without, packed) == ["started"]


@pytest.mark.parametrize("content", [b"", b"\0" * 100, None], ids=["empty", "another Python's", "none"])
def test_without_a_file_for_this_python_imports_go_their_usual_way(packed: Path, content: bytes | None) -> None:
    file = packed / "modules.packed"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert run(USE, packed)[0] == "1 SourceFileLoader True"


def test_every_folder_of_ours_is_looked_at() -> None:
    names = ("sandbox.types", "sandbox.runner.agent")
    index = {name: (f"/app/{name.replace('.', '/')}.py", False, 0, 1) for name in names}
    assert {"/app/sandbox", "/app/sandbox/runner"} <= set(_folders(index))
