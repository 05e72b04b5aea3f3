"""What operators bring for the agent, checked before anything starts; and what leases make of it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.agents.equip import check_team, equip, operator_host_tools
from orchestrator.errors import ConfigError, ProtocolError, ToolError
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.settings.sources import load_config
from orchestrator.settings.table import EnvSettings
from orchestrator.tools.base import FILE_TOOLS
from orchestrator.tools.functions import Workers
from orchestrator.types import CompletionKind, ManagedAgent, Message, Task
from sandbox.runner import wire as sandbox_wire
from sandbox.worker.tools import FILE_TOOLS as SANDBOX_FILE_TOOLS
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import TALK, a_plan, an_agent

ACTION = CompletionKind.ACTION
HELPER = {"name": "helper", "description": "Helps.", "tools": ["read_file"], "max_steps": 3, "agent": "code"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose modules can be brought."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


# ---------------------------------------------------------------- settings


def test_agents_are_chosen_by_settings_and_read_back() -> None:
    config = load_config(
        env={
            "agent": "tool_calling",
            "code_block_tags": "markdown",
            "authorized_imports": ["numpy", "pandas.*"],
            "managed_agents": [HELPER, {"name": "other", "description": "x"}],
        }
    )
    spec = config.agent_spec()
    assert (spec.kind, spec.code_tags, spec.authorized_imports) == (
        "tool_calling",
        ("```python", "```"),
        ("numpy", "pandas.*"),
    )
    assert spec.managed_agents[0] == ManagedAgent("helper", "Helps.", ("read_file",), 3, "code")
    public = json.loads(json.dumps(config.public()))["env"]
    assert public["managed_agents"][0] == HELPER
    again = load_config(env={name: public[name] for name in ("agent", "code_block_tags", "managed_agents")})
    assert again.env.managed_agents == config.env.managed_agents


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("agent", "codeagent"),
        ("agent", "program:"),
        ("code_block_tags", '["<code>"]'),
        ("code_block_tags", '["<code>", "<code>"]'),
        ("code_block_tags", '["<a|b>", "</a>"]'),
        ("code_block_tags", '[" <a>", "</a>"]'),
        ("authorized_imports", '["os; rm"]'),
        ("program_preload", '["os; rm"]'),
        ("program_preload", '["a.*"]'),
        ("program_preload", "litellm"),
        ("sandbox_tools", '["tools.py"]'),
        ("host_tools", "python:m:t"),
        ("managed_agents", '[{"name": "no name", "description": "x"}]'),
        ("managed_agents", '[{"name": "class", "description": "x"}]'),
        ("managed_agents", '[{"name": "a", "description": ""}]'),
        ("managed_agents", '[{"name": "a", "description": "x", "max_steps": 0}]'),
        ("managed_agents", '[{"name": "a", "description": "x", "colour": 1}]'),
        ("managed_agents", '[{"name": "a", "description": "x", "agent": "program"}]'),
        ("managed_agents", '[{"name": "a", "description": "x", "agent": "shell"}]'),
        ("managed_agents", '[{"name": "a", "description": "x"}, {"name": "a", "description": "y"}]'),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"env.{name}: must be"):
        load_config([f"--env.{name}={value}"])


def test_a_program_takes_nothing_that_is_for_smolagents() -> None:
    with pytest.raises(ConfigError, match=r"env\.planning_interval: is for env\.agent code or tool_calling"):
        load_config(env={"agent": "program:x.py", "planning_interval": 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("managed_agents", '[{"name": "helper", "description": "Helps."}]'),
        ("planning_interval", "2"),
        ("sandbox_tools", '["python:m:t"]'),
        ("host_tools", '["python:m:t"]'),
        ("program_preload", '["m"]'),
    ],
)
def test_a_shell_agent_has_one_tool_and_no_team(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.{name}: is for env\.agent .*, not shell"):
        load_config(["--env.agent=shell", f"--env.{name}={value}"])


def test_what_a_shell_agent_is_told() -> None:
    given = ["--env.agent=shell", "--env.instructions=Be brief.", "--env.final_answer_at_max_steps"]
    spec = load_config(given).agent_spec()
    assert (spec.kind, spec.instructions, spec.final_answer_at_max_steps) == ("shell", "Be brief.", True)
    assert spec.calls_tools
    assert not spec.closing_tag


def test_modules_are_preloaded_for_programs_alone() -> None:
    config = load_config(["--env.agent=program:x.py", '--env.program_preload=["litellm", "langgraph.graph"]'])
    assert config.sandbox_spec().preload == ("litellm", "langgraph.graph")
    with pytest.raises(ConfigError, match=r"env\.program_preload: is for env\.agent program:PATH, not code"):
        load_config(env={"program_preload": ["litellm"]})


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a list", "must hold a mapping"),
        ("system_prompt: [1]", "system_prompt must be text"),
        ("system: x", "has 'system'"),
        ("system_prompt: '{{ answer }}'", "uses answer; it is given authorized_imports"),
        ("system_prompt: '{% if %}'", "system_prompt: Expected"),
        ("planning: {initial_plan: '{{ tools }} {{ remaining_steps }}'}", "initial_plan uses remaining_steps"),
        ("a: [", "no valid YAML at line"),
        ("system_prompt: !!int ''", "is no YAML text"),
    ],
)
def test_prompt_templates_are_checked(here: Path, text: str, told: str) -> None:
    (here / "prompts.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"env\.prompt_templates: ") as caught:
        equip(EnvSettings(prompt_templates=here / "prompts.yaml"))
    assert told in str(caught.value)


def test_programs_are_files_or_folders(here: Path) -> None:
    (here / "one.py").write_text("print(1)")
    folder = here / "agent"
    (folder / "sub" / "__pycache__").mkdir(parents=True)
    for name in ("__main__.py", "sub/part.py", "sub/__pycache__/part.pyc"):
        (folder / name).write_text("x = 1")
    (folder / "link.py").symlink_to("/etc/passwd")
    [one] = equip(EnvSettings(agent=f"program:{here / 'one.py'}")).program
    assert (one.path, one.content) == ("__main__.py", b"print(1)")
    several = equip(EnvSettings(agent=f"program:{folder}"))
    assert [file.path for file in several.program] == ["__main__.py", "sub/part.py"]
    assert all(digest.startswith("sha256:") for digest in several.describe()["program"].values())  # type: ignore[attr-defined]
    for wrong in ("nowhere", "agent/sub"):
        with pytest.raises(ConfigError, match="neither a Python file nor a folder"):
            equip(EnvSettings(agent=f"program:{here / wrong}"))
    (here / "one.py").write_bytes(b"#" * (5 << 20))
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        equip(EnvSettings(agent=f"program:{here / 'one.py'}"))


TOOLS = '''
import package_only_the_image_has

def area(width: float, height: "float | None" = None, *, unit: str = "m") -> dict[str, float]:
    """Works out an area.

    Of a rectangle.

    Args:
        width: How wide,
            in metres.
        height (float): How high.

    Returns:
        All about it.
    """
    return {"area": width}

def untyped(x):
    """Does something."""

def undocumented(x: int) -> int:
    return x

def many(*x: int) -> int:
    """Takes many."""

def odd(x: set) -> int:
    """Takes a set."""

async def later() -> int:
    """Takes its time."""
'''


def test_a_sandbox_tool_is_described_without_being_imported(here: Path) -> None:
    (here / "own_area_tools.py").write_text(TOOLS)
    [tool] = equip(EnvSettings(sandbox_tools=("python:own_area_tools:area",))).sandbox_tools
    assert (tool.name, tool.module, tool.source) == ("area", "own_area_tools", TOOLS)
    assert tool.description == "Works out an area.\n\nOf a rectangle."
    assert tool.inputs == {
        "width": {"type": "number", "description": "How wide, in metres."},
        "height": {"type": "number", "description": "How high.", "nullable": True},
        "unit": {"type": "string", "description": "unit", "nullable": True},
    }
    assert tool.output_type == "object"
    for name, told in [
        ("untyped", "argument x has no type annotation"),
        ("undocumented", "no docstring"),
        ("many", "*args"),
        ("odd", "argument x is of type set"),
        ("later", "no function later"),
        ("nothing", "no function nothing"),
    ]:
        with pytest.raises(ConfigError, match=r"env\.sandbox_tools: python:own_area_tools:") as caught:
            equip(EnvSettings(sandbox_tools=(f"python:own_area_tools:{name}",)))
        assert told in str(caught.value)
    with pytest.raises(ConfigError, match="a module of Python itself"):
        equip(EnvSettings(sandbox_tools=("python:json:dumps",)))
    with pytest.raises(ConfigError, match="there is no module no_such_module_here"):
        equip(EnvSettings(sandbox_tools=("python:no_such_module_here:x",)))


HOST = '''
import asyncio, threading, time
from orchestrator.errors import ToolServiceError

release = threading.Event()

def double(number: int, note: str | None = None) -> int:
    """Doubles a number."""
    if number == 13:
        raise ValueError("not that one")
    if number == 12:
        raise OSError("401 for url: https://me:pw@host/v1?api_key=hunter2&q=x")
    if number == 14:
        raise SystemExit(1)
    if number == 15:
        return object()
    return 2 * number

async def slow(text: str) -> str:
    """Takes for ever."""
    await asyncio.Event().wait()

def stuck() -> str:
    """Hangs in a thread."""
    release.wait()
    return "late"

class Look:
    name = "look"
    description = "Looks."
    inputs = {"x": {"type": "string", "description": "What."}}
    output_type = "string"

    async def call(self, arguments):
        if arguments["x"] == "away":
            raise ToolServiceError("the service is away")
        if arguments["x"] == "never":
            await asyncio.Event().wait()
        return f"saw {arguments['x']}"

look = Look()
read_file = double
'''


async def test_host_tools_check_what_comes_and_bound_what_goes(here: Path) -> None:
    (here / "own_host_tools.py").write_text(HOST)
    names = ("double", "slow", "stuck", "look")
    tools = operator_host_tools([f"python:own_host_tools:{name}" for name in names], Workers(1, 1))
    assert tuple(tools) == names
    assert await tools["double"].call({"number": 4, "note": None}) == "8"
    assert await tools["look"].call({"x": "it"}) == "saw it"
    for arguments, told in [
        ({}, "number is missing"),
        ({"number": "4"}, "number must be of type integer, not str"),
        ({"number": True}, "number must be of type integer, not bool"),
        ({"number": None}, "number must be of type integer, not null"),
        ({"number": 1, "colour": 2}, "there is no argument 'colour'"),
        ({"number": 13}, "ValueError: not that one"),
        ({"number": 12}, "OSError: 401 for url: https://host/v1?api_key=[key]&q=x"),
        ({"number": 14}, "RuntimeError: SystemExit: 1"),
        ({"number": 15}, "cannot be told as JSON"),
    ]:
        with pytest.raises(ToolError) as caught:
            await tools["double"].call(arguments)
        assert told in str(caught.value)
    for name, arguments in (("slow", {"text": "x"}), ("look", {"x": "never"})):
        with pytest.raises(ToolError, match="did not answer within 1 seconds"):
            await tools[name].call(arguments)
    with pytest.raises(ToolError, match="x must be of type string, not int"):
        await tools["look"].call({"x": 1})
    with pytest.raises(ToolError, match="the service is away"):  # it ends no rollout
        await tools["look"].call({"x": "away"})
    # A thread that hangs keeps its place until it ends; others wait for it within their own time.
    with pytest.raises(ToolError, match="did not answer"):
        await tools["stuck"].call({})
    with pytest.raises(ToolError, match="did not answer"):
        await tools["double"].call({"number": 1})
    sys.modules["own_host_tools"].release.set()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            assert await tools["double"].call({"number": 1}) == "2"
            break
        except ToolError:
            await asyncio.sleep(0.05)
    else:
        pytest.fail("the place was never given back")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("python:own_host_tools2:read_file", None),
        ("python:own_host_tools2:Look", "neither a function nor an object"),
        ("python:own_host_tools2:nothing", "cannot load"),
    ],
)
def test_host_tools_that_cannot_serve_are_refused(here: Path, spec: str, told: str | None) -> None:
    (here / "own_host_tools2.py").write_text(
        HOST.replace("def double", "def final_answer").replace("= double", "= final_answer")
    )
    with pytest.raises(ConfigError, match=told or "two tools or agents called 'final_answer'"):
        operator_host_tools((spec,), Workers(30.0, 16))


def test_names_are_unique_and_managed_agents_know_their_tools() -> None:
    helper = ManagedAgent("helper", "x", ("read_file", "search"))
    env = EnvSettings(managed_agents=(helper,))
    search: Any = object()
    check_team(env.managed_agents, equip(env), {"search": search})
    with pytest.raises(ConfigError, match="helper is given search; there are read_file"):
        check_team(env.managed_agents, equip(env), {})
    with pytest.raises(ConfigError, match="two tools or agents called 'helper'"):
        check_team((ManagedAgent("helper", "x"),), equip(env), {"helper": search})


def test_the_sandbox_has_the_file_tools_it_is_said_to_have() -> None:
    assert tuple(tool.name for tool in SANDBOX_FILE_TOOLS) == FILE_TOOLS


# ---------------------------------------------------------------- the wire and leases


def test_agents_travel_whole(here: Path) -> None:
    (here / "own_area_tools.py").write_text(TOOLS)
    (here / "prompts.yaml").write_text("managed_agent: {task: 'Do {{task}}.'}")
    env = EnvSettings(sandbox_tools=("python:own_area_tools:area",), prompt_templates=here / "prompts.yaml")
    helpers = (ManagedAgent("helper", "Helps."), ManagedAgent("caller", "Calls.", ("area",), 2, "tool_calling"))
    agent = an_agent(max_steps=5, kind="code", code_tags=("<py>", "</py>"), managed_agents=helpers)
    sent = wire.assignment(Task("t", "q"), agent, {}, equip(env))
    got = sandbox_wire.assignment(pb.Assignment.FromString(sent.SerializeToString()))
    assert (got.agent.kind, got.agent.code_tags) == ("code", ("<py>", "</py>"))
    assert got.agent.prompt_templates == {"managed_agent": {"task": "Do {{task}}."}}
    members = got.agent.managed_agents
    assert [(m.name, m.description, tuple(m.tools), m.max_steps) for m in members] == [
        ("helper", "Helps.", (*FILE_TOOLS, "area"), 5),
        ("caller", "Calls.", ("area",), 2),
    ]
    assert [sandbox_wire.agent_kind(member.kind) for member in members] == ["code", "tool_calling"]
    assert (got.sandbox_tools[0].spec.name, got.sandbox_tools[0].source) == ("area", TOOLS)


@pytest.mark.parametrize("stop", [["x"] * 5, [""], ["x" * 65]])
def test_stop_strings_of_a_sandbox_are_bounded(stop: list[str]) -> None:
    message = pb.Message(role=pb.ROLE_USER, content="x")
    request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[message], stop=stop)
    with pytest.raises(ProtocolError, match="stop strings"):
        wire.completion_request(request.SerializeToString())


async def test_managed_agents_have_steps_and_segments_of_their_own() -> None:
    agent = an_agent(max_steps=2, managed_agents=(ManagedAgent("helper", "x", kind="tool_calling"),))
    completer = ScriptedCompleter(["one", "two", "three", "four"])
    lease = Lease(a_plan(agent=agent), completer, None, {})
    inner = (Message("user", "inner"),)
    longer = (*TALK, Message("assistant", "one"), Message("user", "told"))
    await lease.complete(AgentRequest(1, ACTION, TALK), b"1")
    await lease.complete(AgentRequest(2, ACTION, inner, (), "helper"), b"2")
    more = (*inner, Message("assistant", "two"), Message("user", "go on"))
    await lease.complete(AgentRequest(3, ACTION, more, (), "helper"), b"3")
    await lease.complete(AgentRequest(4, ACTION, longer), b"4")
    assert [(turn.agent, turn.segment) for turn in lease.turns] == [("", 0), ("helper", 1), ("helper", 1), ("", 0)]
    assert [request.stop[-1] for request in completer.requests] == [
        "</code>",
        "Calling tools:",
        "Calling tools:",
        "</code>",
    ]
    with pytest.raises(ProtocolError, match="no managed agent 'stranger'"):
        await lease.complete(AgentRequest(5, ACTION, longer, (), "stranger"), b"5")
    with pytest.raises(ProtocolError, match="only a program"):
        await lease.complete(AgentRequest(5, ACTION, longer, ("x",)), b"5")
    assert (await lease.complete(AgentRequest(5, ACTION, longer), b"5")).ended == "max_steps"


async def test_a_program_brings_its_own_stop_strings_and_no_others_hold() -> None:
    completer = ScriptedCompleter(["one", "two"])
    lease = Lease(a_plan(agent=an_agent(kind="program")), completer, None, {})
    await lease.complete(AgentRequest(1, ACTION, TALK, ("END",)), b"1")
    await lease.complete(AgentRequest(2, ACTION, TALK), b"2")
    assert [request.stop for request in completer.requests] == [("END",), ()]
