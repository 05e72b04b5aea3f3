"""The operator's own tools: `env.sandbox_tools`, sent into the sandbox, and `env.host_tools`, which run here."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.agents.equipment import SandboxTool
from orchestrator.errors import ConfigError
from orchestrator.rules.plugins import PREFIX, load_object
from orchestrator.rules.text import is_name
from orchestrator.tools.base import RESERVED, HostTool
from orchestrator.tools.functions import FunctionTool, Workers
from orchestrator.tools.signatures import Signature, of_function, of_source

MAX_SOURCE_BYTES = 256 * 1024


def sandbox_tool(spec: str) -> SandboxTool:
    """The tool, read from its module's source; nothing of it runs here. Raises ConfigError."""
    flag = "env.sandbox_tools"
    module, _, name = spec.removeprefix(PREFIX).partition(":")
    place = _source_file(module, spec)
    try:
        source = place.read_text("utf-8")
        if len(source.encode()) > MAX_SOURCE_BYTES:
            raise ConfigError(f"{flag}: {spec}: {place} is longer than {MAX_SOURCE_BYTES} bytes")
        tree = ast.parse(source)
    except OSError as error:
        raise ConfigError(f"{flag}: {spec}: cannot read {place}: {error.strerror}") from error
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: {spec}: {place} is no Python: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        raise ConfigError(
            f"{flag}: {spec}: {place} has no function {name} at its top level (`def`, not `async def`)"
        )
    try:
        signature = of_source(functions[-1])
    except ValueError as error:
        raise ConfigError(f"{flag}: {spec}: {error}") from None
    return SandboxTool(name, signature.description, signature.inputs, signature.output_type, module, source)


def host_tool(spec: str, workers: Workers) -> tuple[str, HostTool]:
    """(name, tool), from a function or an object with the members of `HostTool`. Raises ConfigError."""
    flag = "env.host_tools"
    plugin = load_object(spec, flag)
    name = getattr(plugin, "name", None) or getattr(plugin, "__name__", spec.rpartition(":")[2])
    if inspect.isclass(plugin) or not (callable(plugin) or hasattr(plugin, "call")):
        raise ConfigError(f"{flag}: {spec} is neither a function nor an object with description, inputs and call")
    if callable(getattr(plugin, "call", None)):
        return str(name), _object_tool(plugin, spec, workers)
    try:
        signature = of_function(plugin)
    except ValueError as error:
        raise ConfigError(f"{flag}: {spec}: {error}") from None
    return str(name), FunctionTool(plugin, signature, workers)


def demand_tool_names(*groups: Iterable[str]) -> None:
    """Raises ConfigError for a name that is no Python identifier, is reserved or comes twice."""
    names: set[str] = set()
    for name in (name for group in groups for name in group):
        if not is_name(name):
            raise ConfigError(f"{name!r} cannot be the name of a tool: it must be a Python identifier")
        if name in RESERVED or name in names:
            raise ConfigError(f"there are two tools or agents called {name!r}; rename yours")
        names.add(name)


def _object_tool(tool: HostTool, spec: str, workers: Workers) -> HostTool:
    inputs = getattr(tool, "inputs", None)
    texts = (getattr(tool, "description", None), getattr(tool, "output_type", None))
    shaped = isinstance(inputs, Mapping) and all(
        is_name(name) and isinstance(shape, Mapping) and {"type", "description"} <= set(shape)
        for name, shape in inputs.items()
    )
    if not shaped or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"env.host_tools: {spec} needs description and output_type (text) and inputs (argument name to type, "
            "description and, if it may be left out, nullable)"
        )
    if not inspect.iscoroutinefunction(tool.call):
        raise ConfigError(f"env.host_tools: {spec}: its `call` must be an `async def`")

    async def call_tool(**arguments: object) -> str:
        return await tool.call(arguments)

    signature = Signature(tool.description, tool.inputs, tool.output_type)
    return FunctionTool(call_tool, signature, workers, gives_text=True)


def _source_file(module: str, spec: str) -> Path:
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"env.sandbox_tools: {spec}: a module of Python itself cannot be sent; rename yours")
    local = str(Path.cwd())
    if local not in sys.path:
        sys.path.append(local)
    try:
        module_spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        module_spec = None
    if module_spec is None or module_spec.origin is None or not module_spec.origin.endswith(".py"):
        raise ConfigError(f"env.sandbox_tools: {spec}: there is no module {module} with a source file")
    return Path(module_spec.origin)
