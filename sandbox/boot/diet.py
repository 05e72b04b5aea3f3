"""Imports smolagents and gRPC without packages that they import and this sandbox never or seldom uses.

These packages (hub access, HTTP, images, consoles, YAML, hashes, other executors, and asyncio, which only
gRPC's asyncio API needs) would be most of the import time and a third of a parked sandbox's memory. Within
the block they are stand-ins. Afterwards model-written code cannot import a stand-in or a holder of one:
DEFERRED packages leave `sys.modules`, and the worker removes HOLDERS, which took names from them. LATE modules
are held whole, by modules that cannot be imported twice: they become the real ones, loaded at first use.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType

DEFERRED = (
    *("PIL", "dotenv", "huggingface_hub", "requests", "rich"),
    *("hashlib", "yaml"),
    *("smolagents.cli", "smolagents.remote_executors", "jinja2.bccache"),
)
LATE = (
    *("asyncio", "grpc.aio"),
    "google.protobuf.internal.python_message",  # imported and not used: messages are made in C
    # Used by programs, for other agents, or for an error: a tenth of what was left of the import time.
    *("calendar", "difflib", "ipaddress", "pickle", "shutil", "subprocess", "tempfile", "uuid"),
)
HOLDERS = ("smolagents", "jinja2")
_PREFIXES = tuple(f"{package}." for package in (*DEFERRED, *LATE))


class _Empty:
    """Takes any arguments and prints them as text: smolagents wraps what it logs in rich's classes."""

    def __init__(self, *parts: object, **options: object) -> None:
        self._parts = parts

    def __str__(self) -> str:
        return "\n".join(map(str, self._parts))


class _StandIn(ModuleType):
    """A module in which every name is an empty class: it can be imported, inherited from, and compared with."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Empty,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder:
    """Finds stand-ins for the deferred packages and everything below them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if _is_deferred(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Within this block DEFERRED and LATE packages are stand-ins, unless they were imported before.

    Garbage collection is off meanwhile, and passes over what was imported when it is on again: imports leave no
    garbage, and looking for some took a tenth of the time, and as much again at the end.
    """
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            gc.enable()
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if not isinstance(module, _StandIn):
                continue
            if name in LATE:
                _make_late(name, module)
            else:
                del sys.modules[name]
                _forget_in_parent(name, module)


def _is_deferred(name: str) -> bool:
    return f"{name}.".startswith(_PREFIXES)


def _make_late(name: str, module: ModuleType) -> None:
    """Turns a stand-in into the real module, which is loaded when an attribute of it is first looked at."""
    del sys.modules[name]
    spec = find_spec(name)
    sys.modules[name] = module
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no module {name}", name=name)
    vars(module).clear()
    vars(module).update(vars(module_from_spec(spec)))
    module.__class__ = ModuleType
    LazyLoader(spec.loader).exec_module(module)


def _forget_in_parent(name: str, module: ModuleType) -> None:
    """Removes a stand-in from its package too, where the import system bound it."""
    parent, _, child = name.rpartition(".")
    package = sys.modules.get(parent)
    if package is not None and vars(package).get(child) is module:
        delattr(package, child)
