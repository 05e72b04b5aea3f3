"""Makes what a process has in memory stay as it is, so that what is forked from it copies little.

A page of memory is common to parent and child until one of them writes to it. Python writes to each object that it
only looks at, because it counts references; the collector writes to all of them; and new objects take the places
that old ones left, here and there. What comes after `settle` finds immortal objects, which nobody counts, in no
collector's list, and no free places among them, of Python's or of the C library's.
"""

import gc
import sys
from _ctypes import _SimpleCData
from types import CodeType

# As the count of references: from Python 3.12 on (PEP 683); tried up to 3.14. There, libraries that were compiled
# for older ones add to it and must not reach 1 << 32.
_IMMORTAL = 0xFFFF_FFFF if sys.version_info < (3, 14) else 3 << 30
_VERSIONS = ((3, 12), (3, 14))
# Of code, which the collector does not look into.
_PARTS = ("co_consts", "co_names", "co_linetable", "co_exceptiontable", "co_qualname", "co_filename")
_POOL_BYTES, _HEADER_BYTES = 16_384, 48  # of Objects/obmalloc.c
_STEP_BYTES, _LARGEST_BYTES = 16, 512
_BYTES_OVERHEAD = 33  # of a bytes object
_MOST_PLACES = 20_000  # of one size
_kept: list[object] = []


class _Count(_SimpleCData):  # type: ignore[type-arg]
    _type_ = "I"


def settle() -> None:
    """For good. Nothing is forked before that."""
    gc.collect()
    _make_immortal()
    gc.collect()
    _fill_places()
    _fill_heap()
    gc.freeze()


def _make_immortal() -> None:
    """All objects that can be reached. From here on none is freed, as those of modules never are."""
    if not _VERSIONS[0] <= sys.version_info[:2] <= _VERSIONS[1]:
        return
    seen: dict[int, object] = {}  # none is freed meanwhile: its memory would be another one's
    waiting = gc.get_objects()
    ours = {id(seen), id(waiting)}
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or id(thing) in ours:
            continue
        seen[id(thing)] = thing
        waiting.extend(gc.get_referents(thing))
        if type(thing) is CodeType:  # `isinstance` would ask the object, which may do anything
            waiting.extend(getattr(thing, name) for name in _PARTS)
            waiting.extend(thing.co_consts)
    for address in seen:
        _Count.from_address(address).value = _IMMORTAL


def _fill_places() -> None:
    """Of each size of small objects until Python takes a fresh pool for the next one."""
    for size in range(_STEP_BYTES, _LARGEST_BYTES + 1, _STEP_BYTES):
        for _ in range(_MOST_PLACES):
            filler = _of(size)
            if id(filler) % _POOL_BYTES < _HEADER_BYTES + size:
                break
            _kept.append(filler)


def _fill_heap() -> None:
    """The free places that the C library has for larger objects, until it takes fresh memory for each size."""
    from ctypes import CDLL, c_void_p

    heap = CDLL(None)
    heap.malloc.restype = heap.sbrk.restype = c_void_p
    end = heap.sbrk(0)
    for size in range(1 << 16, 0, -16):
        while 0 < (place := heap.malloc(size) or 0) < end:
            pass
        heap.free(c_void_p(place))


def _of(size: int) -> object:
    """A new object of so many bytes."""
    if size > 2 * _STEP_BYTES:
        return bytes(size - _BYTES_OVERHEAD)
    return object() if size == _STEP_BYTES else (1 << 29) + len(_kept)
