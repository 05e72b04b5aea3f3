"""Who may import whom, and that nothing goes round in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Names, values and pure rules: no input, no output, no clock. `base` is a room's contract. `network` reads what
# the environment says of proxies and certificates, `named_keys` the keys that settings name.
VOCABULARY = {"types", "rules", "errors", "network", "named_keys"}
# Who carries a rollout out, from the inside outwards: each may import those before it.
WAY_OUT = ("host", "engine")
BACKENDS = ("border", "launch", "proxy", "completion", "scorers", "tools", "tasks")
# Where one of these rooms does need another's code, and why.
NEEDED = {
    ("proxy.turns", "completion.line"): "a lease continues the id line",
    ("proxy.turns", "completion.prompt_text"): "a lease says how an answer begins",
    ("proxy.turns", "completion.harmless"): "a lease looks once at the tools that a program brings",
    ("proxy.lease", "completion.control"): "a lease asks the endpoint's control who is to blame",
    ("proxy.completions", "completion.control"): "its completions ask that",
    ("proxy.lease", "tools.arguments"): "what a sandbox gives a tool must fit the record before it is called",
    ("proxy.server", "launch.names"): "both sides agree on the name of the socket",
    ("proxy.service", "tasks.attachments"): "one place opens attachments, and never through a link",
    ("scorers.open", "completion.chat"): "the judge is an endpoint",
    ("scorers.open", "completion.endpoints"): "the judge is an endpoint",
    ("scorers.open", "completion.http"): "the judge is an endpoint",
    ("scorers.open", "completion.startup"): "the judge's endpoint may be loading",
    ("scorers.reasoning_gym", "tasks.reasoning_gym"): "a generated task is graded by the set that made it",
}
# What each room of a user of the backends may see of the others.
MAY_SEE = {
    "agents": {"settings", "tools"},
    "calls": set(),
    "settings": {"launch", "run", "scorers", "tasks", "tools"},
    "run": {"settings"},
    "terminal": {"run"},
    "report": {"completion", "run"},
    "demo": {"tasks"},
    "grading": {"border", "launch", "services"},
    "services": {"launch"},
    "forward": {"completion", "local_model", "run", "terminal"},
}
FROM_OUTSIDE = {  # what lies on disk, and what an agent is equipped with, is read by rooms that write neither
    "completion.replay": {"run"},
    "completion.endpoints": {"agents", "settings"},
    "completion.find_tokenizer": {"settings"},
    "scorers.open": {"settings"},
    "tasks.no_tasks": {"settings"},
    "tasks.split": {"settings"},
    "tools.recorded": {"run"},
    "tools.operator_tools": {"agents"},
    "proxy.lease": {"agents"},
    "proxy.wire": {"agents"},
    "tasks.decoder": {"terminal"},
}
# The one home of a foreign library that takes seconds to import: imported where it is used, never with a module.
HOMES = {
    "torch": "orchestrator.forward.model",
    "peft": "orchestrator.forward.model",
    "gguf": "orchestrator.forward.weights",
    "safetensors": "orchestrator.forward.weights",
    "trl": "orchestrator.trainers.trl_async",
    "accelerate": "orchestrator.trainers.trl",
}
# Packages of trainers and of who watches a run: each is known in one file, imported only where it is used.
ONE_FILE = {
    "cryptography": "orchestrator.border.authority",
    "prometheus_client": "orchestrator.telemetry.metrics",
    "opentelemetry": "orchestrator.telemetry.tracing",
    "openenv": "orchestrator.trainers.openenv",
    "verl": "orchestrator.trainers.verl",
    "mcp": "orchestrator.tools.mcp.session",
    "omegaconf": "orchestrator.trainers.verl",
}
# Who has the whole of the settings, and why; besides commands, each of which is given what was read.
WHOLE = {
    "settings.config settings.sources atropos.settings trainers.verl_terms": "they make it",
    "engine.orchestrator engine.shared engine.one_group engine.sync": "an engine is opened with all of it",
    "engine.starts": "the agent of an earlier run is compared, setting by setting",
    "host.setup": "a host is opened with all of it",
    "cluster.order cluster.remote cluster.host": "a host is opened so at another machine",
    "doctor.host cluster.doctor": "a machine is asked for all that a run would ask of it",
    "atropos.environment atropos.service trainers.openenv trainers.verl": "they open an engine for a trainer",
    "atropos.terms": "what a trainer gets follows from settings of five sections",
}
OUTERMOST = {"atropos", "commands", "cli", "trainers"}  # nobody else may import these
# What a room would be in a circle by, and why it stays.
BACK = {
    ("host.registry", "cluster"): "a registry names the backends, so that no other module of the core does",
    ("atropos.environment", "commands"): "an Atropos environment has a `process` of its own: ours",
    ("atropos.environment", "cli"): "an Atropos environment has a command line of its own: ours",
    ("tools.operator_tools", "agents"): "the names of the tools that an agent brings",
    ("scorers.reasoning_gym", "tasks"): "a generated task is graded by the set that made it",
}
CIRCLES = {  # between two modules
    ("sandbox.runner.endpoint.handler", "sandbox.runner.endpoint.server"): "http.server makes one of the other",
}


# Atropos' own names are rows like the others; Atropos itself is not imported with them.
ATROPOS_ROWS = ("settings.table", "atropos.rows")


def _name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    files = [file for package in ("orchestrator", "sandbox") for file in (ROOT / package).rglob("*.py")]
    return {_name(file): file for file in files if "demo/files" not in file.as_posix()}


@cache
def _all_targets() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """What each module imports, by name: (when it is imported, inside functions too)."""
    each = {}
    for name, file in modules().items():
        tree = ast.parse(file.read_text("utf-8"))
        each[name] = (frozenset(_targets(tree, late=False)), frozenset(_targets(tree, late=True)))
    return each


@cache
def targets_of(*, late: bool) -> dict[str, frozenset[str]]:
    """What each module imports, by name."""
    return {name: targets[late] for name, targets in _all_targets().items()}


@cache
def imports(*, late: bool) -> set[tuple[str, str]]:
    """(module, module it imports) of our own, for types alone too; `late`: inside functions too."""
    pairs = set()
    for name, targets in targets_of(late=late).items():
        for target in targets:
            while target and target not in modules():
                target = target.rpartition(".")[0]
            if target and target != name:
                pairs.add((name, target))
    return pairs


def _targets(node: ast.AST, *, late: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) or (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not late):
            continue  # no expression holds a statement
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _targets(child, late=late)


def inside(name: str) -> str:
    """`completion.line` of `orchestrator.completion.line`."""
    return name.partition(".")[2]


def room(name: str) -> str:
    return inside(name).partition(".")[0]


def first(name: str) -> str:
    """The room of a name inside a package."""
    return name.partition(".")[0]


def ours(package: str) -> list[tuple[str, str]]:
    pairs = [(a, b) for a, b in imports(late=True) if a.startswith(f"{package}.") and b.startswith(f"{package}.")]
    return [(inside(a), inside(b)) for a, b in sorted(pairs) if room(a) != room(b)]


def is_vocabulary(name: str) -> bool:
    pure = {*VOCABULARY, "calls"}  # one room of pure rules has a name of its own
    return first(name) in pure or name.endswith((".base", ".trajectory"))


def demand_no_circle(pairs: Iterable[tuple[str, str]]) -> None:
    graph: dict[str, set[str]] = {}
    for a, b in pairs:
        graph.setdefault(a, set()).add(b)
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path[path.index(name) :], name))
        if name not in done:
            for following in graph.get(name, ()):
                walk(following, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_there_is_no_circle_of_modules() -> None:
    # A module's own package holds nothing that it needs.
    demand_no_circle((a, b) for a, b in imports(late=True) - set(CIRCLES) if not a.startswith(f"{b}."))


def test_there_is_no_circle_of_rooms() -> None:
    pairs = [(a, b) for a, b in ours("orchestrator") if b and (a, first(b)) not in BACK]
    # The settings are read by rooms that they also name.
    demand_no_circle((first(a), first(b)) for a, b in pairs if not is_vocabulary(b) and first(b) != "settings")


def test_at_most_six_modules_stand_at_the_top() -> None:
    assert len([name for name, file in modules().items() if file.parent == ROOT / "orchestrator"]) <= 6


def test_the_core_names_no_cluster_but_in_the_registry() -> None:
    importers = {a for a, b in ours("orchestrator") if first(b) == "cluster"}
    assert importers == {"host.registry", "commands.doctor"}


def test_the_vocabulary_needs_nothing_but_itself() -> None:
    wrong = [(a, b) for a, b in ours("orchestrator") if first(a) in VOCABULARY and not is_vocabulary(b)]
    assert wrong == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_know_the_vocabulary_and_not_each_other(backend: str) -> None:
    wrong = []
    for a, b in ours("orchestrator"):
        other = first(b)
        if first(a) != backend or is_vocabulary(b) or (a, b) in NEEDED:
            continue
        if other not in FROM_OUTSIDE.get(a, ()):
            wrong.append((a, b))
    assert wrong == []


@pytest.mark.parametrize("watched", MAY_SEE)
def test_rooms_around_the_backends_see_what_they_need(watched: str) -> None:
    wrong = [
        (a, b)
        for a, b in ours("orchestrator")
        if first(a) == watched
        and not is_vocabulary(b)
        and first(b) not in {*MAY_SEE[watched]}
        and (a, b) != ATROPOS_ROWS
    ]
    assert wrong == []


@pytest.mark.parametrize("place", range(len(WAY_OUT)))
def test_who_carries_a_rollout_out_knows_nobody_further_out(place: int) -> None:
    further = {*WAY_OUT[place + 1 :], *OUTERMOST, "evaluation", "report", "doctor"}
    wrong = [(a, b) for a, b in ours("orchestrator") if first(a) == WAY_OUT[place] and first(b) in further]
    assert wrong == []


def test_nobody_imports_the_commands_but_the_command_line() -> None:
    pairs = [(a, b) for a, b in ours("orchestrator") if first(b) in OUTERMOST and (a, b) != ATROPOS_ROWS]
    wrong = [(a, b) for a, b in pairs if first(a) not in {*OUTERMOST, "__main__"}]
    assert wrong == []


def test_the_worker_has_nothing_of_those_that_hold_keys_and_sockets() -> None:
    wrong = [
        (a, b) for a, b in ours("sandbox") if a.startswith("worker") and b.startswith(("runner", "pid1", "boot"))
    ]
    assert wrong == []


def test_sandbox_and_orchestrator_share_the_wire_alone() -> None:
    wrong = [(a, b) for a, b in imports(late=True) if first(a) != first(b)]
    assert wrong == []


def importing(library: str, *, late: bool) -> set[str]:
    """Our modules that import this foreign library."""
    each = targets_of(late=late).items()
    return {name for name, targets in each if library in {target.partition(".")[0] for target in targets}}


@pytest.mark.parametrize(("library", "home"), HOMES.items())
def test_a_heavy_library_has_one_home_and_is_imported_late(library: str, home: str) -> None:
    assert importing(library, late=True) == {home}
    assert importing(library, late=False) == set()


@pytest.mark.parametrize(("library", "home"), ONE_FILE.items())
def test_a_rare_library_is_known_in_one_file(library: str, home: str) -> None:
    assert importing(library, late=True) == {home}


def test_every_exception_is_one() -> None:
    pairs = set(ours("orchestrator"))
    assert set(NEEDED) <= pairs
    assert set(BACK) <= {(a, first(b)) for a, b in pairs}
    assert set(CIRCLES) <= imports(late=True)
    for name, rooms in FROM_OUTSIDE.items():
        assert rooms == {first(b) for a, b in pairs if a == name} & rooms
    for watched, rooms in MAY_SEE.items():
        assert rooms <= {first(b) for a, b in pairs if first(a) == watched}


def test_modules_take_their_section_of_the_settings_and_seldom_the_whole() -> None:
    """The class itself: a value that has a Config may be asked for a section of it."""
    whole = ("orchestrator.settings.config.Config", "orchestrator.settings.table.EnvSettings")
    holders = {name for name, targets in targets_of(late=True).items() if targets & set(whole)}
    outside = {inside(name) for name in holders if room(name) not in ("", "commands")}
    assert outside == {module for modules_ in WHOLE for module in modules_.split()}
