"""`orchestrator process` as a process of its own, against a scripted endpoint: started, signalled, killed,
resumed, and what it left compared."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.forked import Forked, forked, hear_hangups
from tests.fakes.inference import Reply, Script, by_task
from tests.fakes.tokenizer import tokenizer_folder

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "import sys; from orchestrator.cli import main; sys.exit(main())")
DEADLINE_S = 240.0
# Variables that no module reads while it is imported: a fork of a process that has imported all reads them too.
# The runtime of sandboxes lies there: with a cache of its own each command would unpack it anew.
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
_READ_LATE = re.compile(r"DOCKER_HOST|HOME|XDG_CACHE_HOME|(OPENAI|JUDGE|TAVILY)_API_KEY|ORCHESTRATOR_\w+")


@contextmanager
def place() -> Iterator[Path]:
    """A directory for runs; its path is short enough for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="run", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextmanager
def cleaning() -> Iterator[None]:
    """`orchestrator cleanup` removes what is left of any run or build on the machine. So one test at a time has it
    run, or makes what it would take."""
    with (Path("/tmp") / f"orchestrator-tests-cleanup-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_tasks(path: Path, count: int, bad: int | None = None) -> Path:
    """`count` tasks called q0, q1 …, the answers being their numbers; one row may be no task."""
    rows = [
        {"task_id": f"q{n}", "question": f"What is number {n} (of q{n}!)?", "answer": str(n)} for n in range(count)
    ]
    lines = [json.dumps(row) for row in rows]
    if bad is not None:
        lines.insert(bad, "{torn")
    path.write_text("\n".join(lines) + "\n")
    return path


def answers(count: int, delay_s: float = 0.0) -> Script:
    """Of each task's rollouts some are right, some wrong, some take two steps: by their seeds, so that the same
    rollout says the same whenever it is asked."""
    tasks = {}
    for n in range(count):
        say = [
            [f"Thought: {n}.\n<code>\nfinal_answer({n})\n</code>"],
            [f"Thought: not {n}.\n<code>\nfinal_answer(-1)\n</code>"],
            [
                f"Thought: look.\n<code>\nx = {n}\nprint(x)\n</code>",
                "Thought: so.\n<code>\nfinal_answer(x)\n</code>",
            ],
        ]
        tasks[f"of q{n}!"] = [[Reply(text, delay_s=delay_s) for text in turns] for turns in say]
    return by_task(tasks, by="seed")


def flags(directory: Path, base_url: str, **env: object) -> list[str]:
    """The command line of a small run in `directory`, without isolation."""
    settings: dict[str, object] = {
        "dataset": f"jsonl:{directory / 'tasks.jsonl'}",
        "run_dir": directory / "run",
        "launcher": "process",
        "tokenizer_name": tokenizer_folder(),
        "group_size": 2,
        "max_concurrent_sandboxes": 4,
        "seed": 7,
        **env,
    }
    given = [f"--env.{name}={value}" for name, value in settings.items() if value is not None]
    return [*given, f"--openai.base_url={base_url}", "--openai.model_name=scripted"]


@dataclass(slots=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def traceback(self) -> bool:
        return "Traceback" in self.stderr


@dataclass(slots=True)
class Running:
    """A command under way, in a session of its own."""

    process: asyncio.subprocess.Process | Forked
    temporary: Path

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self) -> Ended:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return Ended(self.process.returncode, out.decode(), err.decode())


@asynccontextmanager
async def running(
    *arguments: str,
    directory: Path,
    environ: Mapping[str, str] | None = None,
    command: str = "process",
    wrapper: tuple[str, ...] = (),
    program: tuple[str, ...] = COMMAND,
) -> AsyncIterator[Running]:
    """The command, behind `wrapper`, with its own HOME, TMPDIR and working directory. Killed when the block is
    left."""
    temporary = directory / "t"
    temporary.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
        "HOME": str(directory),
        "XDG_CACHE_HOME": CACHE,
        "TMPDIR": str(temporary),
        **(environ or {}),
    }
    process: asyncio.subprocess.Process | Forked
    read_late = all(_READ_LATE.fullmatch(name) for name in environ or ())
    if read_late and not wrapper and program == COMMAND and _asks_no_hub(arguments):
        process = await forked((command, *arguments), environment, directory)
    else:
        process = await asyncio.create_subprocess_exec(
            *wrapper,
            *program,
            command,
            *arguments,
            cwd=directory,
            preexec_fn=hear_hangups,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    try:
        yield Running(process, temporary)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def run(*arguments: str, directory: Path, **how: Any) -> Ended:
    """The command from start to end; `how` as for `running`."""
    async with running(*arguments, directory=directory, **how) as started:
        return await started.ended()


def outcome_seen(run_directory: Path, name: str) -> bool:
    """Whether an attempt ended so, also while the file is being written."""
    rollouts = run_directory / "rollouts.jsonl"
    return rollouts.exists() and f'"outcome":"{name}"'.encode() in rollouts.read_bytes()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something another process does."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)
    assert condition(), what


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line must be whole."""
    if not path.exists():
        return []
    text = path.read_text()
    assert not text or text.endswith("\n"), f"{path} ends in half a line"
    return [json.loads(line) for line in text.splitlines()]


def whole_lines(path: Path) -> int:
    """How many lines are finished by now."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def outcomes(run_directory: Path) -> Counter[str]:
    return Counter(line["outcome"] for line in lines(run_directory / "rollouts.jsonl"))


def printed_outcomes(ended: Ended) -> Counter[str]:
    """The counts in the closing table."""
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("outcomes")]
    return Counter({name: int(count) for name, count in re.findall(r"(\w+) (\d+)", line)})


def essence(groups_file: Path) -> list[str]:
    """What is trained on, group by group, without what differs between two equal runs."""
    result = []
    for group in lines(groups_file):
        members = sorted(
            zip(
                (facts["rollout_id"].rpartition("-")[0] for facts in group["overrides"]),
                (facts["task_id"] for facts in group["overrides"]),
                (facts["outcome"] for facts in group["overrides"]),
                group["tokens"],
                group["masks"],
                group["scores"],
                group["inference_logprobs"] or [None] * len(group["tokens"]),
                group["messages"],
                strict=True,
            )
        )
        result.append(json.dumps(members))
    return sorted(result)


def _asks_no_hub(arguments: Sequence[str]) -> bool:
    """Where the hub is and keeps its files is read when its library is imported."""
    named = [argument for argument in arguments if argument.startswith("--env.tokenizer_name")]
    return all(argument == f"--env.tokenizer_name={tokenizer_folder()}" for argument in named)
