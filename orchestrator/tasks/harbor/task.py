"""Makes a Task of one of Harbor's task folders, or says why it is not run here.

task.toml  instruction.md  environment/[Dockerfile]  tests/test.sh  [tests/Dockerfile]  [solution/solve.sh]
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.cells import cell_text, plain, storable
from orchestrator.tasks.harbor import compose
from orchestrator.tasks.harbor.config import MAX_TOML_BYTES, Artifact, Environment, TaskConfig, parse, variables
from orchestrator.tasks.harbor.folder import TaskFolder
from orchestrator.tasks.harbor.refusal import UNREADABLE, Refusal
from orchestrator.tasks.rows import IMAGE, MAX_ID_CHARS, MAX_LEVEL_CHARS, MAX_QUESTION_BYTES
from orchestrator.tasks.surroundings import surroundings
from orchestrator.types import BadTask, Collect, Grader, Healthcheck, Task

PUBLISHED = "/logs/artifacts"  # a separate verifier gets what lies there, whatever is declared
_COMPOSE, _IMAGE, _STEPS = "compose", "an image", "several steps"
_LONGEST_CHECK_S = 14_400.0
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a folder holds. `need`: what it needs that is not had here, of a BadTask. `unknown`: keys of its
    task.toml that are not read."""

    task: Task | BadTask
    need: str = UNREADABLE
    unknown: tuple[str, ...] = ()


def read_folder(path: Path, source: str) -> Reading:
    """Raises nothing."""
    unknown: tuple[str, ...] = ()
    task_id = path.name.encode("utf-8", "backslashreplace").decode()
    try:
        with TaskFolder.opened(path) as folder:
            if (text := folder.text("task.toml", MAX_TOML_BYTES)) is None:
                raise BadRow("it has no task.toml")
            config = parse(text)
            task_id, unknown = config.task.name if config.task else task_id, tuple(config.unknown)
            if not task_id.isprintable() or len(task_id) > MAX_ID_CHARS:
                raise BadRow(f"its name must have 1 to {MAX_ID_CHARS} printable characters")
            return Reading(_task(task_id, config, folder, source), unknown=unknown)
    except BadRow as error:
        need = error.need if isinstance(error, Refusal) else UNREADABLE
        return Reading(BadTask(task_id[:MAX_ID_CHARS], str(error)), need, unknown)


def _task(task_id: str, config: TaskConfig, folder: TaskFolder, source: str) -> Task:
    _refuse(config, folder)
    environment, agent = config.environment, config.agent
    dockerfile = _made_of(environment, folder)
    place = _place("environment", environment, agent.user)
    timeout_s = agent.timeout_sec
    network = environment.network if agent.network_mode is None else agent.network_mode
    return Task(
        task_id=task_id,
        question=_question(folder),
        level=_level(config),
        source=source,
        metadata=_metadata(config),
        dockerfile=dockerfile,
        # The format's limit is on all of the agent's time; ours on its own work must not end it before.
        limits={} if timeout_s is None else {"rollout_timeout": timeout_s, "rollout_deadline": timeout_s},
        cpus=environment.cpus,
        memory_bytes=environment.memory_bytes,
        storage_bytes=environment.storage_bytes,
        grader=_grader(config, folder),
        healthcheck=_healthcheck(config),
        notes=() if network == "no-network" else (f"its task asks for a network ({network}); it has had none",),
        **place,
    )


def _refuse(config: TaskConfig, folder: TaskFolder) -> None:
    """Raises Refusal for what is well-formed and not had here."""
    verifier = config.verifier.environment
    for name, environment in (("environment", config.environment), ("verifier.environment", verifier)):
        if environment is None:
            continue
        if environment.os.lower() != "linux":
            raise Refusal("Windows", f"{name}.os is {ascii(environment.os)[:40]}; sandboxes are Linux'")
        if environment.gpus:
            raise Refusal("a GPU", f"{name} needs {environment.gpus} GPUs, and a sandbox has none")
        if environment.tpu is not None:
            raise Refusal("a TPU", f"{name} needs a TPU, and a sandbox has none")
        if environment.mcp_servers:
            raise Refusal("an MCP server", f"{name} names MCP servers, which agents here do not get")
    if config.steps:
        raise Refusal(_STEPS, "it has several steps ([[steps]]), which are not carried out yet")
    if folder.has("trajectory.json"):
        raise Refusal("a conversation before the first turn", "trajectory.json begins its conversation: not yet")
    artifacts = [one for one in config.artifacts if isinstance(one, Artifact)]
    services = {one.service for one in artifacts} | {one.service for one in config.verifier.collect}
    if others := services - {"main"}:
        raise Refusal(_COMPOSE, f"it needs compose: it names the service {ascii(min(others))[:40]}")
    if config.verifier.is_separate and folder.has(f"tests/{compose.FILE}"):
        raise Refusal(_COMPOSE, f"it needs compose: its verifier has tests/{compose.FILE}")


def _made_of(environment: Environment, folder: TaskFolder) -> str:
    """A Task's `dockerfile`. As in Harbor, the name of an image comes first."""
    image = environment.docker_image
    text = folder.text(f"environment/{compose.FILE}", compose.MAX_BYTES)
    if text is not None:
        image = compose.image_of_main(text) or image
    if image:
        return _named("environment", image)
    if folder.has("environment/Dockerfile"):
        return str(folder.path / "environment" / "Dockerfile")
    raise Refusal(_IMAGE, "it has neither environment/Dockerfile nor environment.docker_image")


def _named(where: str, image: str) -> str:
    if not IMAGE.fullmatch(image):
        raise BadRow(f"{where}: {ascii(image)[:60]} is no image name")
    return f"FROM {image}"


def _place(where: str, environment: Environment, user: str | int | None) -> dict[str, Any]:
    """`root`, `cwd`, `user` and `environment` of a Task."""
    row = {
        "root": "writable",
        "cwd": environment.workdir,
        "user": None if user is None else str(user),
        "env": variables(environment.env, f"{where}.env"),
    }
    try:
        place = surroundings(row)
    except BadRow as error:
        raise BadRow(f"{where}: {error}") from error
    return {**place, "cwd": place["cwd"] or ""}


def _healthcheck(config: TaskConfig) -> Healthcheck | None:
    """As in Harbor, of the agent's environment alone, and run as the image's user."""
    if (check := config.environment.healthcheck) is None:
        return None
    found = Healthcheck(
        check.command,
        interval_s=check.interval_sec,
        timeout_s=check.timeout_sec,
        start_period_s=check.start_period_sec,
        start_interval_s=check.start_interval_sec,
        retries=max(1, check.retries),
        # Where the agent has a user of its own, it is not known here whom the image names: mostly root.
        as_root=config.agent.user is not None,
    )
    if found.longest_s > _LONGEST_CHECK_S:
        limits = f"may take {found.longest_s:g} s, at most {_LONGEST_CHECK_S:g} are waited for"
        raise BadRow(f"environment.healthcheck {limits}")
    return found


def _grader(config: TaskConfig, folder: TaskFolder) -> Grader:
    verifier, separate = config.verifier, config.verifier.is_separate
    own = verifier.environment or config.environment
    dockerfile = None
    if separate and verifier.environment is not None and verifier.environment.docker_image:
        dockerfile = _named("verifier.environment", verifier.environment.docker_image)
    elif separate and folder.has("tests/Dockerfile"):
        dockerfile = str(folder.path / "tests" / "Dockerfile")
    if dockerfile is None and not folder.has("tests/test.sh"):
        raise BadRow("it has no tests/test.sh")
    folder.demand_plain("tests")
    solved = folder.has("solution/solve.sh")
    if solved:
        folder.demand_plain("solution")
    # Without a user of its own, Harbor's verifier has the image's, not the agent's.
    user = verifier.user if verifier.user is not None or config.agent.user is None else "root"
    place = _place("verifier", own.model_copy(update={"env": {**own.env, **verifier.env}}), user)
    return Grader(
        "harbor",
        tests=str(folder.path / "tests") if dockerfile is None else None,
        timeout_s=verifier.timeout_sec or 600.0,
        dockerfile=dockerfile,
        declared=_declared(config) if separate else None,
        named=_declared(config) if config.artifacts and not separate else (),
        collect=tuple(
            Collect(one.command, one.timeout_sec, None if one.user is None else str(one.user))
            for one in verifier.collect
        ),
        user=place["user"],
        cwd=(place["cwd"] or None) if dockerfile is None else place["cwd"],
        environment=place["environment"],
        solution=str(folder.path / "solution") if solved else None,
        solution_environment=variables(config.solution.env, "solution.env"),
        healthcheck=None if separate else _healthcheck(config),
    )


def _declared(config: TaskConfig) -> tuple[str, ...]:
    paths = [PUBLISHED]
    for one in config.artifacts:
        path = one if isinstance(one, str) else one.source
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not path.startswith("/") or ".." in parts or "\0" in path:
            raise BadRow(f"artifacts: {ascii(path)[:60]} must be an absolute path in the sandbox, without `..`")
        paths.append("/" + "/".join(parts))
    return tuple(dict.fromkeys(paths))


def _question(folder: TaskFolder) -> str:
    """The instruction, without the lines at its top that mark benchmarks for those who collect training data."""
    text = folder.text("instruction.md", MAX_QUESTION_BYTES)
    if text is None:
        raise BadRow("it has no instruction.md")
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    question = "\n".join(lines).lstrip("\n")
    if not question.strip():
        raise BadRow("instruction.md is blank")
    return question


def _level(config: TaskConfig) -> str | None:
    value = plain(config.metadata.get("difficulty"))
    if value is None:
        return None
    level = cell_text(value, "metadata.difficulty", 4 * MAX_LEVEL_CHARS).strip()
    if len(level) > MAX_LEVEL_CHARS:
        raise BadRow(f"metadata.difficulty has {len(level)} characters, at most {MAX_LEVEL_CHARS} are allowed")
    return level or None


def _metadata(config: TaskConfig) -> dict[str, Any]:
    """[metadata], whose `tags` are its own, its category and the task's keywords."""
    metadata = storable(config.metadata)
    own = metadata.get("tags")
    tags = [*(own if isinstance(own, list) else ()), metadata.get("category")]
    tags += config.task.keywords if config.task else ()
    texts = list(dict.fromkeys(tag for tag in tags if isinstance(tag, str) and tag))
    return {**metadata, **({"tags": texts} if texts else {})}
