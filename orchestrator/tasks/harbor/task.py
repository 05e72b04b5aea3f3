"""Makes a Task of one of Harbor's task folders, or says why it is not run here.

task.toml  instruction.md  environment/[Dockerfile]  tests/test.sh  [tests/Dockerfile]  [solution/solve.sh]
[trajectory.json]

With several steps, each has instruction.md, tests, solution and a workdir of its own in steps/NAME/; tests and
solution of the task are those of steps that lack them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.cells import cell_text, plain, storable
from orchestrator.tasks.harbor import compose
from orchestrator.tasks.harbor.config import (
    MAX_TOML_BYTES,
    Artifact,
    Environment,
    McpServer,
    Step,
    TaskConfig,
    Verifier,
    parse,
    variables,
)
from orchestrator.tasks.harbor.config import Healthcheck as HealthcheckConfig
from orchestrator.tasks.harbor.folder import TaskFolder
from orchestrator.tasks.harbor.refusal import UNREADABLE, Refusal
from orchestrator.tasks.harbor.trajectory import FILE, MAX_BYTES, context_of
from orchestrator.tasks.network import hosts_of
from orchestrator.tasks.rows import IMAGE, MAX_ID_CHARS, MAX_LEVEL_CHARS, MAX_QUESTION_BYTES
from orchestrator.tasks.surroundings import absolute, surroundings
from orchestrator.types import BadTask, Collect, Grader, Healthcheck, Service, Task, TaskStep

PUBLISHED = "/logs/artifacts"  # a separate verifier gets what lies there, whatever is declared
_COMPOSE, _IMAGE = "compose", "an image"
_HAD = "it had what env.egress gave it"
_LONGEST_CHECK_S = 14_400.0
_MAX_STEP_BYTES = 2 << 20  # of its files
_SETUP = "workdir/setup.sh"
_SETUP_S = 600.0  # Harbor has no limit


@dataclass(frozen=True, slots=True)
class Reading:
    """What a folder holds. `need`: what it needs that is not had here, of a BadTask. `unknown`: keys of its
    task.toml that are not read."""

    task: Task | BadTask
    need: str = UNREADABLE
    unknown: tuple[str, ...] = ()


def read_folder(path: Path, source: str, mcp_servers: Collection[str] = ()) -> Reading:
    """`mcp_servers`: names of the operator's, which stand for those that the task names. Raises nothing."""
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
            return Reading(_task(task_id, config, folder, source, mcp_servers), unknown=unknown)
    except BadRow as error:
        need = error.need if isinstance(error, Refusal) else UNREADABLE
        return Reading(BadTask(task_id[:MAX_ID_CHARS], str(error)), need, unknown)


def _task(task_id: str, config: TaskConfig, folder: TaskFolder, source: str, mcp_servers: Collection[str]) -> Task:
    composed = _compose(folder)
    near = {server.name: port for server in config.environment.mcp_servers if (port := _near(server, composed))}
    _refuse(config, folder, composed, {*mcp_servers, *near})
    told = _told([one for one in config.environment.mcp_servers if one.name in near.keys() - {*mcp_servers}])
    dockerfile = _made_of(config.environment, folder, composed)
    config = _with_main(config, composed)
    environment, agent = config.environment, config.agent
    place = _place("environment", environment, agent.user)
    steps = tuple(_step(step, config, folder, told) for step in config.steps)
    # Each step has its own time; of these, the longest.
    times = [step.timeout_s for step in steps] or [agent.timeout_sec]
    timeout_s = max((time for time in times if time is not None), default=None)
    trajectory = folder.text(f"{_home(config.steps[0])}{FILE}" if config.steps else FILE, MAX_BYTES)
    network = environment.network if agent.network_mode is None else agent.network_mode
    allowed = environment.allowed_hosts if agent.allowed_hosts is None else agent.allowed_hosts
    return Task(
        task_id=task_id,
        question=steps[0].question if steps else _question(folder) + told,
        level=_level(config),
        source=source,
        metadata=_metadata(config),
        dockerfile=dockerfile,
        # The format's limit is on all of the agent's time; ours on its own work must not end it before.
        limits={} if timeout_s is None else {"rollout_timeout": timeout_s, "rollout_deadline": timeout_s},
        cpus=environment.cpus,
        memory_bytes=environment.memory_bytes,
        storage_bytes=environment.storage_bytes,
        grader=steps[0].grader if steps else _grader(config, folder),
        healthcheck=_healthcheck(config),
        network=hosts_of(network, allowed or ()),
        notes=() if network == "no-network" else (f"its task asks for a network ({network}): {_HAD}",),
        context=() if trajectory is None else context_of(trajectory),
        steps=steps,
        steps_reward=config.multi_step_reward_strategy or "mean",
        services=() if composed is None else _serving(composed.services, near.values()),
        extra_hosts=() if composed is None else composed.main.extra_hosts,
        **place,
    )


def _home(step: Step) -> str:
    return f"steps/{step.name}/"


def _step(step: Step, config: TaskConfig, folder: TaskFolder, told: str) -> TaskStep:
    home = _home(step)
    if step.agent.user not in (None, config.agent.user):
        raise Refusal("another user in a step", f"its step {step.name} has an agent of another user than the task")
    verifier, task = step.verifier, config.verifier
    mode = (
        "separate"
        if (verifier if verifier.environment or verifier.environment_mode else task).is_separate
        else "shared"
    )
    own = task.model_copy(
        update={
            "environment_mode": mode,
            "environment": verifier.environment or task.environment,
            "env": verifier.env or task.env,
            "user": task.user if verifier.user is None else verifier.user,
            "timeout_sec": verifier.timeout_sec or task.timeout_sec,
            "collect": [*task.collect, *verifier.collect],
        }
    )
    config = config.model_copy(update={"artifacts": [*config.artifacts, *step.artifacts]})
    check = None if step.healthcheck is None else _check(step.healthcheck, f"the healthcheck of step {step.name}")
    grader = _grader(config, folder, own, home)
    return TaskStep(
        step.name,
        _question(folder, home) + told,
        grader=grader if check is None or grader.declared is not None else replace(grader, healthcheck=check),
        least=step.least,
        files=folder.files(f"{home}workdir", _MAX_STEP_BYTES),
        setup=Healthcheck(
            'bash "$PWD/setup.sh"', timeout_s=_SETUP_S, interval_s=0.0, start_interval_s=0.0, retries=1
        )
        if folder.has(f"{home}{_SETUP}")
        else None,
        healthcheck=check,
        timeout_s=step.agent.timeout_sec or config.agent.timeout_sec,
    )


def _compose(folder: TaskFolder) -> compose.Compose | None:
    """None: there is no such file."""
    place = f"environment/{compose.FILE}"
    if (text := folder.text(place, compose.MAX_BYTES)) is None:
        return None
    read = compose.read_compose(text, place, lambda name: folder.text(name, compose.MAX_BYTES), folder.has)

    def placed(service: Service) -> Service:
        made = str(service.dockerfile)
        return service if made.startswith("FROM ") else replace(service, dockerfile=str(folder.path / made))

    return replace(read, services=tuple(map(placed, read.services)))


def _near(server: McpServer, composed: compose.Compose | None) -> tuple[str, int] | None:
    """The service at whose port an MCP server listens, as the agent finds it; None: it is elsewhere."""
    try:
        url = urlsplit(server.url or "")
        host, port = url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
    except ValueError:
        return None
    services = () if composed is None else composed.services
    name = next((one.name for one in services if one.for_agent and host in (one.name, *one.aliases)), None)
    return None if name is None or not port else (name, port)


def _serving(services: Sequence[Service], places: Collection[tuple[str, int]]) -> tuple[Service, ...]:
    """The services, found at these ports, too."""
    return tuple(
        replace(one, ports=tuple(sorted({*one.ports, *(port for name, port in places if name == one.name)})))
        for one in services
    )


def _told(servers: Sequence[McpServer]) -> str:
    """As in Harbor, an agent is told of the task's MCP servers: it asks them itself."""
    lines = [f"- {one.name} ({one.transport or 'sse'}): {one.url}\n" for one in servers]
    return f"\n\nThese MCP servers are there for the task:\n{''.join(lines)}" if lines else ""


def _with_main(config: TaskConfig, composed: compose.Compose | None) -> TaskConfig:
    """What task.toml says goes before what the compose file says of `main`."""
    if composed is None:
        return config
    main, environment = composed.main, config.environment
    found: dict[str, Any] = {"env": {**main.environment, **environment.env}}
    if environment.workdir is None:
        found["workdir"] = main.cwd
    if environment.cpus is None:
        found["cpus"] = main.cpus
    if environment.memory_bytes is None and main.memory_bytes is not None:
        found["memory_mb"] = max(1, main.memory_bytes >> 20)
    if environment.healthcheck is None and (check := main.healthcheck) is not None:
        found["healthcheck"] = HealthcheckConfig(
            command=check.command,
            interval_sec=check.interval_s,
            timeout_sec=check.timeout_s,
            start_period_sec=check.start_period_s,
            start_interval_sec=check.start_interval_s,
            retries=check.retries,
        )
    agent = config.agent if config.agent.user is not None else config.agent.model_copy(update={"user": main.user})
    return config.model_copy(update={"environment": environment.model_copy(update=found), "agent": agent})


def _refuse(
    config: TaskConfig, folder: TaskFolder, composed: compose.Compose | None, mcp_servers: Collection[str]
) -> None:
    """Raises Refusal for what is well-formed and not had here."""
    places = [("environment", config.environment), ("verifier.environment", config.verifier.environment)]
    places += [(f"verifier.environment of step {step.name}", step.verifier.environment) for step in config.steps]
    for name, environment in places:
        if environment is None:
            continue
        if environment.os.lower() != "linux":
            raise Refusal("Windows", f"{name}.os is {ascii(environment.os)[:40]}; sandboxes are Linux'")
        if environment.gpus:
            raise Refusal("a GPU", f"{name} needs {environment.gpus} GPUs, and a sandbox has none")
        if environment.tpu is not None:
            raise Refusal("a TPU", f"{name} needs a TPU, and a sandbox has none")
        # A data set chooses neither what runs here nor what is reached: a server that is none of its services is
        # the operator's.
        if unknown := {server.name for server in environment.mcp_servers} - set(mcp_servers):
            needs = f"{name} names the MCP server {ascii(min(unknown))[:60]}"
            raise Refusal(
                "an MCP server", f"{needs}: name one so in env.mcp_servers, and it stands for the task's"
            )
    parts: list[TaskConfig | Step] = [config, *config.steps]
    artifacts = [one for part in parts for one in part.artifacts if isinstance(one, Artifact)]
    services = {one.service for one in artifacts} | {
        one.service for part in parts for one in part.verifier.collect
    }
    there = {compose.MAIN, *(() if composed is None else (one.name for one in composed.services))}
    if others := services - there:
        raise Refusal(_COMPOSE, f"it needs compose: it names the service {ascii(min(others))[:40]}")
    if config.verifier.is_separate and folder.has(f"tests/{compose.FILE}"):
        raise Refusal(_COMPOSE, f"it needs compose: its verifier has tests/{compose.FILE}")


def _made_of(environment: Environment, folder: TaskFolder, composed: compose.Compose | None) -> str:
    """A Task's `dockerfile`. As in Harbor, the name of an image comes first."""
    image = environment.docker_image
    if composed is not None:
        if composed.dockerfile is not None:
            return str(folder.path / composed.dockerfile)
        image = composed.image or image
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
    if config.environment.healthcheck is None:
        return None
    found = _check(config.environment.healthcheck, "environment.healthcheck")
    # Where the agent has a user of its own, it is not known here whom the image names: mostly root.
    return replace(found, as_root=config.agent.user is not None)


def _check(check: HealthcheckConfig, where: str) -> Healthcheck:
    """Run as the agent, as Harbor does with those of steps."""
    found = Healthcheck(
        check.command,
        interval_s=check.interval_sec,
        timeout_s=check.timeout_sec,
        start_period_s=check.start_period_sec,
        start_interval_s=check.start_interval_sec,
        retries=max(1, check.retries),
    )
    if found.longest_s > _LONGEST_CHECK_S:
        limits = f"may take {found.longest_s:g} s, at most {_LONGEST_CHECK_S:g} are waited for"
        raise BadRow(f"{where} {limits}")
    return found


def _grader(config: TaskConfig, folder: TaskFolder, verifier: Verifier | None = None, home: str = "") -> Grader:
    """`verifier`, `home`: a step's, and where its folders are; else the task's."""
    verifier = verifier or config.verifier
    separate = verifier.is_separate
    own = verifier.environment or config.environment
    dockerfile = None
    if separate and verifier.environment is not None and verifier.environment.docker_image:
        dockerfile = _named("verifier.environment", verifier.environment.docker_image)
    elif separate:
        made = next((place for place in (f"{home}tests", "tests") if folder.has(f"{place}/Dockerfile")), None)
        dockerfile = None if made is None else str(folder.path / made / "Dockerfile")
    # What a step has lies over what the task has for all of them.
    tests = [place for place in dict.fromkeys((f"{home}tests", "tests")) if folder.has_folder(place)]
    if dockerfile is None and not any(folder.has(f"{place}/test.sh") for place in tests):
        raise BadRow(f"it has no {home}tests/test.sh")
    for one in tests:
        folder.demand_plain(one)
    tests = [] if dockerfile is not None else [str(folder.path / place) for place in tests]
    solution = next((one for one in (f"{home}solution", "solution") if folder.has(f"{one}/solve.sh")), None)
    if solution is not None:
        folder.demand_plain(solution)
    # Without a user of its own, Harbor's verifier has the image's, not the agent's.
    user = verifier.user if verifier.user is not None or config.agent.user is None else "root"
    place = _place("verifier", own.model_copy(update={"env": {**own.env, **verifier.env}}), user)
    return Grader(
        "harbor",
        tests=tests[0] if tests else None,
        shared_tests=tests[1] if len(tests) > 1 else None,
        timeout_s=verifier.timeout_sec or 600.0,
        dockerfile=dockerfile,
        declared=_declared(config) if separate else None,
        named=_declared(config) if config.artifacts and not separate else (),
        collect=tuple(
            Collect(
                one.command,
                one.timeout_sec,
                None if one.user is None else str(one.user),
                "" if one.service == compose.MAIN else one.service,
            )
            for one in verifier.collect
        ),
        of_services=_of_services(config),
        user=place["user"],
        cwd=(place["cwd"] or None) if dockerfile is None else place["cwd"],
        environment=place["environment"],
        solution=None if solution is None else str(folder.path / solution),
        solution_environment=variables(config.solution.env, "solution.env"),
        healthcheck=None if separate else _healthcheck(config),
    )


def _declared(config: TaskConfig) -> tuple[str, ...]:
    paths = [PUBLISHED]
    for one in config.artifacts:
        if isinstance(one, Artifact) and one.service != compose.MAIN:
            continue
        path = one if isinstance(one, str) else one.source
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not path.startswith("/") or ".." in parts or "\0" in path:
            raise BadRow(f"artifacts: {ascii(path)[:60]} must be an absolute path in the sandbox, without `..`")
        paths.append("/" + "/".join(parts))
    return tuple(dict.fromkeys(paths))


def _of_services(config: TaskConfig) -> tuple[tuple[str, str], ...]:
    """(service, absolute path) of what the grader gets of services, at the same place."""
    of = [one for one in config.artifacts if isinstance(one, Artifact) and one.service != compose.MAIN]
    return tuple(dict.fromkeys((one.service, absolute(one.source, "artifacts")) for one in of))


def _question(folder: TaskFolder, home: str = "") -> str:
    """The instruction, without the lines at its top that mark benchmarks for those who collect training data."""
    text = folder.text(f"{home}instruction.md", MAX_QUESTION_BYTES)
    if text is None:
        raise BadRow(f"it has no {home}instruction.md")
    question = "\n".join(dropwhile(_is_canary, text.split("\n"))).lstrip("\n")
    if not question.strip():
        raise BadRow(f"{home}instruction.md is blank")
    return question


def _is_canary(line: str) -> bool:
    line = line.strip().lower()
    return "canary" in line and (line.startswith("#") or (line.startswith("<!--") and line.endswith("-->")))


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
