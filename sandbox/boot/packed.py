"""Packs all modules that pid 1 imports into one file, with the image: `python -m sandbox.boot.packed`. With names
of modules it packs these and what they import, for programs that are to find them imported (`preloaded`).

The file also holds what these modules compile at import (`compiled`), and the names of modules that were looked
for and not found. A container starts with nothing of its file system cached, and each of some 200 modules takes
several lookups and reads: a sixth of the import time, more where the file system is a program (fuse-overlayfs
looks at everything in a folder and in its subfolders). Where the file does not fit the installed packages, as in
an image made from ours with other versions, imports go their usual way.

This module imports only what Python has loaded or built in: all else is to come out of the file.
"""

import marshal
import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import (  # type: ignore[attr-defined]
    MAGIC_NUMBER,
    ExtensionFileLoader,
    NamespaceLoader,
    PathFinder,
    SourceFileLoader,
    _NamespacePath,
    spec_from_file_location,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import CodeType
    from typing import Any

    Compiled = Mapping[tuple[object, ...], object]
    # File, whether it is a package, start and size of its code. Size 0: an .so, or a module that is loaded late.
    Entry = tuple[str, bool, int, int]

FILE = os.path.join(sys.prefix, "modules.packed")
# The image's, as the modules in it are; the runtime is the same for all.
PRELOADED = os.path.join("/opt/packages" if sys.prefix == "/opt/sandbox" else sys.prefix, "preload.packed")
_LENGTH_BYTES = 8


class _PackedLoader(SourceFileLoader):
    """Gives a module's packed code once; after that it is an ordinary SourceFileLoader."""

    def __init__(self, name: str, path: str, packed: memoryview) -> None:
        super().__init__(name, path)
        self._packed = packed

    def get_code(self, fullname: str) -> "CodeType | None":
        code: CodeType = marshal.loads(self._packed)  # noqa: S302 - made with the image, as all code in it
        del self._packed
        self.__class__ = SourceFileLoader  # type: ignore[assignment]
        return code


class _Finder:
    """Takes the place of `PathFinder`, and asks it for modules that are not in the file."""

    # importlib_metadata takes it away.
    find_distributions = staticmethod(getattr(PathFinder, "find_distributions", lambda *context: ()))

    def __init__(self, tables: "tuple[Any, ...]", codes: memoryview) -> None:
        self._index: Mapping[str, Entry]
        self._namespaces: Mapping[str, list[str]]
        self._index, self._namespaces, absent, self.compiled = tables
        self._absent = frozenset(absent)
        self._codes = codes

    def find_spec(self, name: str, path: "Sequence[str] | None" = None, target: "Any" = None) -> ModuleSpec | None:
        if name in self._absent:
            return None
        if name in self._namespaces:
            spec = ModuleSpec(name, None, is_package=True)
            # As `PathFinder` makes it: other folders of the package are looked up when they are needed.
            spec.submodule_search_locations = _NamespacePath(
                name,
                self._namespaces[name],
                PathFinder._get_spec,  # type: ignore[attr-defined]
            )
            return spec
        if (entry := self._index.get(name)) is None:
            return PathFinder.find_spec(name, path, target)
        file, is_package, start, size = entry
        loader: ExtensionFileLoader | SourceFileLoader
        if size:
            loader = _PackedLoader(name, file, self._codes[start : start + size])
        else:
            loader = (SourceFileLoader if file.endswith(".py") else ExtensionFileLoader)(name, file)
        return spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=[] if is_package else None
        )


class PackedImports:
    """Within `with PackedImports():` modules come out of the file, if it exists and fits."""

    def __init__(self, file: str = FILE) -> None:
        self._finder = _open(file)

    def __enter__(self) -> None:
        if self._finder is None:
            return
        sys.meta_path[sys.meta_path.index(PathFinder)] = self._finder
        from sandbox.boot.compiled import compiled

        self._compiled = compiled(self._finder.compiled)
        self._compiled.__enter__()

    def __exit__(self, *raised: "Any") -> None:
        if self._finder is None:
            return
        self._compiled.__exit__(*raised)
        sys.meta_path[sys.meta_path.index(self._finder)] = PathFinder


def _open(file: str) -> _Finder | None:
    try:
        with open(file, "rb") as opened:
            content = memoryview(opened.read())
    except OSError:
        return None
    if content[: len(MAGIC_NUMBER)] != MAGIC_NUMBER:
        return None
    start = len(MAGIC_NUMBER) + _LENGTH_BYTES
    end = start + int.from_bytes(content[len(MAGIC_NUMBER) : start], "big")
    folders, *tables = marshal.loads(content[start:end])  # noqa: S302
    if any(_changed_at(folder) != changed_at for folder, changed_at in folders.items()):
        return None
    return _Finder(tables, content[end:])


class Absent:
    """`with Absent() as absent:` collects the names of modules that are not found within this block."""

    def __enter__(self) -> set[str]:
        self._names: set[str] = set()
        sys.meta_path.append(self)
        return self._names

    def __exit__(self, *raised: "Any") -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> None:
        """Called when no other finder found the module."""
        self._names.add(name)


def pack(file: str, compiled: "Compiled", absent: "Iterable[str]" = ()) -> int:
    """Writes the modules imported so far, with `compiled` and `absent`. Returns how many modules."""
    index: dict[str, Entry] = {}
    namespaces: dict[str, list[str]] = {}
    codes: list[bytes] = []
    end = 0
    for name, module in list(sys.modules.items()):
        # Not `module.__spec__`: that would load a module that is loaded late.
        if not issubclass(type(module), type(sys)):  # some objects say that they are modules
            continue
        spec = object.__getattribute__(module, "__dict__").get("__spec__")
        if spec is None or spec.name != name:
            continue
        if type(spec.loader) is NamespaceLoader:
            namespaces[name] = list(spec.submodule_search_locations)
        elif type(spec.loader) is SourceFileLoader:
            late = spec.loader_state is not None
            code = b"" if late else marshal.dumps(spec.loader.get_code(name))
            index[name] = (spec.origin, spec.submodule_search_locations is not None, end, len(code))
            codes.append(code)
            end += len(code)
        elif type(spec.loader) is ExtensionFileLoader:
            index[name] = (spec.origin, False, 0, 0)
    missed = sorted(set(absent) - set(sys.modules))
    head = marshal.dumps((_folders(index), index, namespaces, missed, compiled))  # type: ignore[arg-type]
    with open(file, "wb") as opened:
        opened.write(MAGIC_NUMBER + len(head).to_bytes(_LENGTH_BYTES, "big") + head)
        opened.writelines(codes)
    return len(index)


def _folders(index: "Mapping[str, Entry]") -> "dict[str, int | None]":
    """Of the top-level modules and of ours: an installed package, or a change of ours, shows in one."""
    folders = set()
    for name, (file, is_package, _, _) in index.items():
        folder = os.path.dirname(file)
        if name.startswith("sandbox."):
            folders.add(folder)
        elif "." not in name:
            folders.add(os.path.dirname(folder) if is_package else folder)
    return {folder: _changed_at(folder) for folder in folders}


def _changed_at(folder: str) -> int | None:
    """In whole seconds: not every way to move an image keeps fractions. None: no such folder."""
    try:
        return int(os.stat(folder).st_mtime)
    except OSError:
        return None


def forget_ours() -> None:
    """Takes this package out of `sys.modules`: a program is to find none of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sandbox"]:
        del sys.modules[name]


def main(modules: "Sequence[str]") -> None:
    """Imports and packs these modules, or what pid 1 imports."""
    from sandbox.boot.compiled import recording
    from sandbox.boot.imported import imported

    file = PRELOADED if modules else FILE
    with recording() as compiled, Absent() as absent:
        if modules:
            for name in modules:
                __import__(name)
            forget_ours()
        else:
            imported()
    print(f"{pack(file, compiled, absent)} modules in {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
