"""Everything that pid 1 imports in one file, made with the image: `python -m sandbox.packed`.

With the modules comes what they compile while they are imported (`compiled`).

A container starts with nothing of its file system cached, and each of some 270 modules takes several lookups
and reads: a sixth of all importing. Where the file does not fit what is installed, as in an image that was made
from ours and has other versions, imports go their usual way.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER, spec_from_file_location
from types import CodeType

FILE = os.path.join(sys.prefix, "modules.packed")
_LENGTH_BYTES = 8

Entry = tuple[str, bool, int, int]  # file, whether it is a package, where its code is; no code: compiled to an .so


class _PackedLoader(SourceFileLoader):
    """An ordinary module's loader that has the code at hand, once."""

    def __init__(self, name: str, path: str, packed: memoryview) -> None:
        super().__init__(name, path)
        self._packed: memoryview | None = packed

    def get_code(self, fullname: str) -> CodeType | None:
        packed, self._packed = self._packed, None
        if packed is None:
            return super().get_code(fullname)
        code: CodeType = marshal.loads(packed)  # noqa: S302 - made with the image, as all code in it
        return code


class _Finder:
    def __init__(
        self,
        index: Mapping[str, Entry],
        compiled: Mapping[tuple[object, ...], object],
        codes: memoryview,
    ) -> None:
        self.compiled = compiled
        self._index = index
        self._codes = codes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object | None = None
    ) -> ModuleSpec | None:
        if (entry := self._index.get(name)) is None:
            return None
        file, is_package, start, size = entry
        loader = (
            _PackedLoader(name, file, self._codes[start : start + size])
            if size
            else ExtensionFileLoader(name, file)
        )
        return spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=[] if is_package else None
        )


@contextmanager
def packed_imports(file: str = FILE) -> Iterator[None]:
    """Within this block modules come out of the file, if it is there and fits."""
    finder = _open(file)
    if finder is None:
        yield
        return
    sys.meta_path.insert(0, finder)
    try:
        from sandbox.compiled import compiled

        with compiled(finder.compiled):
            yield
    finally:
        sys.meta_path.remove(finder)


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
    folders, index, compiled = marshal.loads(content[start:end])  # noqa: S302
    if any(_changed_at(folder) != changed_at for folder, changed_at in folders.items()):
        return None
    return _Finder(index, compiled, content[end:])


def pack(file: str, compiled: Mapping[tuple[object, ...], object]) -> int:
    """Writes what has been imported so far, with what was compiled meanwhile; how many modules."""
    index: dict[str, Entry] = {}
    codes: list[bytes] = []
    end = 0
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.name != name or spec.origin is None:
            continue
        if type(spec.loader) is SourceFileLoader:
            code = marshal.dumps(spec.loader.get_code(name))
            index[name] = (spec.origin, spec.submodule_search_locations is not None, end, len(code))
            codes.append(code)
            end += len(code)
        elif type(spec.loader) is ExtensionFileLoader:
            index[name] = (spec.origin, False, 0, 0)
    head = marshal.dumps((_folders(index), index, compiled))  # type: ignore[arg-type]
    with open(file, "wb") as opened:
        opened.write(MAGIC_NUMBER + len(head).to_bytes(_LENGTH_BYTES, "big") + head)
        opened.writelines(codes)
    return len(index)


def _folders(index: Mapping[str, Entry]) -> dict[str, int | None]:
    """Where the top-level modules lie, and our own: what installs or upgrades a package changes one of them."""
    folders = set()
    for name, (file, is_package, _, _) in index.items():
        folder = os.path.dirname(file)
        if name.startswith(f"{__package__}."):
            folders.add(folder)
        elif "." not in name:
            folders.add(os.path.dirname(folder) if is_package else folder)
    return {folder: _changed_at(folder) for folder in folders}


def _changed_at(folder: str) -> int | None:
    """In seconds: not every way to move an image keeps more. None: it is not there."""
    try:
        return int(os.stat(folder).st_mtime)
    except OSError:
        return None


def main() -> None:
    """Imports what pid 1 imports, and writes it down."""
    from sandbox.__main__ import imported
    from sandbox.compiled import recording

    with recording() as compiled:
        imported()
    print(f"{pack(FILE, compiled)} modules in {FILE}")


if __name__ == "__main__":
    main()
