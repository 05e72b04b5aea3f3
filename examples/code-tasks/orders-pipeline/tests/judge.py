"""Keeps what grades apart from what is graded. The same file lies in the tests of every task.

Delivered code runs as a user of its own with limits of time, memory and output, and none of its processes is left
when a result is written. It gets inputs and never an expected output. It can neither read the tests nor write the
reward. That needs a verifier that is root, as Harbor's is by default; with less, `finish` says what was open.
"""

import contextlib
import csv
import io
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

APP, TESTS, LOGS = Path("/app"), Path("/tests"), Path("/logs/verifier")
USER = 64115  # nobody else's: all its processes are delivered code
MEMORY_BYTES, OUTPUT_BYTES = 400 << 20, 4 << 20
WALL_S = 30  # of one run, against what waits for ever: a machine under load needs much more than `cpu_s`
ALL_RUNS_S = 150  # of all runs together, within verifier.timeout_sec
FAILED = object()  # what a call gave that raised, took too long or gave nothing that JSON has

_until = time.monotonic() + ALL_RUNS_S
_open = []  # what delivered code could do all the same


class Run(NamedTuple):
    """What a program did. `status` is negative, and the texts are empty, where a limit or a signal ended it."""

    status: int
    stdout: str
    stderr: str


def text(path, limit=1_000_000):
    """A delivered text; None where there is no regular file of UTF-8 and at most `limit` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = b""
        while len(content) <= limit and (more := os.read(descriptor, limit + 1 - len(content))):
            content += more
        return content.decode() if len(content) <= limit else None
    except UnicodeDecodeError:
        return None
    finally:
        os.close(descriptor)


def table(content):
    """The rows of a delivered CSV text; none where it is no CSV."""
    try:
        return list(csv.reader(io.StringIO(content or "", newline="")))
    except csv.Error:
        return []


def folder():
    """A new folder that delivered code may write to."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    return path


def run(argv, stdin="", cpu_s=2, cwd=APP):
    """Runs delivered code. Its processes are dead when this returns."""
    wall_s = min(WALL_S, _until - time.monotonic())
    if wall_s <= 0:
        return Run(-1, "", "")
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        other = {"user": USER, "group": USER, "extra_groups": []} if _APART else {}
        env = {"PATH": os.environ["PATH"], "HOME": "/tmp", "LANG": "C.UTF-8"}
        try:
            process = subprocess.Popen(
                argv, stdin=given, stdout=out, stderr=err, cwd=cwd, env=env, start_new_session=True,
                preexec_fn=lambda: _limit(cpu_s), **other,
            )  # fmt: skip
        except OSError:  # no folder, no such program
            return Run(-1, "", "")
        try:
            status = process.wait(wall_s)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        _end(process)
        return Run(status, _read(out), _read(err)) if status >= 0 else Run(status, "", "")


def call(path, function, inputs):
    """What a delivered function returns for each list of arguments: JSON's values, or FAILED."""
    ran = run([sys.executable, "-c", _CALLER, path, function], json.dumps(inputs))
    values = [_value(line) for line in ran.stdout.splitlines()[: len(inputs)]]
    return values + [FAILED] * (len(inputs) - len(values))


def same(value, expected):
    """Whether two of JSON's values are one: 1 is neither 1.0 nor true."""
    try:
        return value is not FAILED and json.dumps(value, sort_keys=True) == json.dumps(expected, sort_keys=True)
    except RecursionError:
        return False


def finish(parts, named=False):
    """Writes the reward, which is the mean of the parts, and with `named` each part too."""
    parts = {name: round(float(part), 4) for name, part in parts.items()}
    mean = round(sum(parts.values()) / len(parts), 4)
    for name in ("reward.json", "reward.txt"):
        _remove(LOGS / name)
    content = json.dumps({"reward": mean, **parts}) if named else str(mean)
    with open(LOGS / ("reward.json" if named else "reward.txt"), "x") as file:
        file.write(content + "\n")
    for line in [*_open, *(f"{name}: {part}" for name, part in parts.items()), f"reward: {mean}"]:
        print(line)


# Answers line by line, so that what a later call breaks costs nothing that went before. The delivered code's own
# output goes to stderr.
_CALLER = """
import json, os, runpy, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
path, name = sys.argv[1:]
sys.path.insert(0, os.path.dirname(path))
inputs = json.load(sys.stdin)
function = runpy.run_path(path)[name]
for arguments in inputs:
    try:
        line = json.dumps({"value": function(*arguments)})
    except BaseException as error:
        line = json.dumps({"error": type(error).__name__})
    print(line, file=answers, flush=True)
"""


def _value(line):
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return FAILED
    return answer["value"] if isinstance(answer, dict) and "value" in answer else FAILED


def _limit(cpu_s):
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(process):
    """Ends the program and whatever it started, also what left its session."""
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    if _APART:
        child = os.fork()
        if child == 0:
            try:
                os.setresgid(USER, USER, USER)
                os.setresuid(USER, USER, USER)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    process.wait()


def _read(file):
    file.seek(0)
    return file.read(OUTPUT_BYTES).decode(errors="replace")


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _separate():
    """Gives delivered code a user, its own folder, and nothing else. Whether this process may do so."""
    try:
        subprocess.run(["true"], check=True, user=USER, group=USER, extra_groups=[])
    except OSError:
        _open.append("open: delivered code runs as the verifier's own user")
        return False
    for path, mode in ((TESTS, 0o700), (LOGS, 0o755)):
        try:
            path.chmod(mode)
        except OSError as error:
            _open.append(f"open: the mode of {path} cannot be changed: {error.strerror}")
    for path in _app():
        os.chown(path, USER, USER)
        path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o777 | (0o700 if path.is_dir() else 0o600))
    return True


def _app():
    """The delivered folders and files, and no link. Removes pipes and the like: who reads one waits for ever."""
    for top, _, names in os.walk(APP):
        for path in (Path(top), *(Path(top, name) for name in names)):
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                yield path
            elif not stat.S_ISLNK(mode):
                path.unlink()


os.umask(0o022)  # what graders write, delivered code has to read
LOGS.mkdir(parents=True, exist_ok=True)
_APART = _separate()
