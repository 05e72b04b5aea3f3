"""Which part of an agent's state is graded. Pure.

What a task declares is kept, and nothing else. So it is where a task only names what the agent's work is, and its
own solution is known to need no more (`check-tasks`). Else, where the solution is known to leave its work in some
folders, those are kept. Else all is kept but for the places through which the tests themselves could be taken
over: programs, libraries, start files of shells, Python and git, and settings of pytest.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from orchestrator.types import Difference, Grader, Scope

# Of folders, paths end with `/`; so a name before `$` is that of a file, or of a link in a folder's place.
_PLACES = (
    r"(?:usr/(?:local/)?)?(?:s?bin|lib(?:32|64|x32|exec)?)$",
    r"(?:usr/)?(?:s?bin|lib(?:32|64|x32|exec)?)/",
    r"usr/local/s?bin/",
    r"usr/local/lib/[^/]+$",
    r"(?:usr|usr/local|etc|root|home|home/[^/]+|run|var|dev|proc|sys|opt/sandbox)$",
    r"etc/(?:ld\.so[^/]*|profile|profile\.d|bash\.bashrc|bash_completion\.d|zsh|environment|cron[^/]*|pam[^/]*)(?:/|$)",
    r"etc/(?:sudoers|sudoers\.d|init[^/]*|gitconfig|inputrc|pip\.conf|shells|alternatives|nsswitch\.conf)(?:/|$)",
    r"etc/python[^/]*/",
    r"(?:root|home/[^/]+)/\.(?:bash|profile|z|python|pdb|git|pytest|inputrc|curlrc|wgetrc|npmrc|pip|env)[^/]*(?:/|$)",
    r"(?:root|home/[^/]+)/\.(?:local/(?:bin|lib)|config/(?:git|pip|uv|fish))(?:/|$)",
    r"(?:conftest\.py|pytest\.ini|\.pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml)$",
    r"(?:tests|logs|solution)(?:/|$)",
)
# Wherever they are: modules that Python imports by itself, or pytest.
_NAMES = (
    r"(?:site|user)customize(?:\.[^/]*)?(?:/|$)",
    r"[^/]+\.pth$",
    r"conftest\.(?:py|pyc)$",
    r"(?:site|dist)-packages$",
    r"(?:site|dist)-packages/(?:_?pytest|pluggy|iniconfig|py\.py|py|exceptiongroup|[^/]*pytest[^/]*)(?:[./]|$)",
)
_OURS = r"/(?:tests|logs|solution)(?:/|$)"
_TAKEOVERS = f"/(?:{'|'.join(_PLACES)}|(?s:.*/)?(?:{'|'.join(_NAMES)}))"  # names of folders may have any character
# Folders that an agent may have made anew: what the image has there shows all the same.
MERGED = r"/(?:usr|usr/local|usr/local/lib|etc|root|home|home/[^/]+|var|run)/$"
_MADE = {"/logs/", "/logs/agent/", "/logs/artifacts/", "/logs/verifier/"}  # in each sandbox that runs a command
_takeover = re.compile(_TAKEOVERS)


@dataclass(frozen=True, slots=True)
class InScope:
    """`kept`, `dropped`, `merged`: as of `launch.base.State`."""

    scope: Scope
    kept: tuple[str, ...] | None
    dropped: str
    merged: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """For people."""
        return ("/",) if self.kept is None else self.kept


def in_scope(grader: Grader) -> InScope:
    """What of an agent's state this grader gets."""
    checked = grader.checked
    if grader.declared is not None:
        return InScope("declared", outermost(grader.declared), "")
    spared = _but_for(() if checked is None else checked.takeovers)
    if checked is not None and checked.named_suffice and grader.named:
        return InScope("declared", outermost(grader.named), spared)
    if checked is not None and checked.scope is not None and "/" not in checked.scope:
        return InScope("solution", outermost(checked.scope), spared)
    return InScope("whole", None, spared, MERGED)


def holds_nothing(scope: InScope, difference: Difference) -> bool:
    """Whether nothing of it is in scope for certain: then what is graded is the untouched image."""
    if scope.kept is None or difference.left_out or difference.count > len(difference.changes):
        return False
    kept = [f"{path.rstrip('/')}/" for path in scope.kept]
    changed = [f"{change.path.rstrip('/')}/" for change in difference.changes if change.path not in _MADE]
    return not any(one.startswith(path) or path.startswith(one) for one in changed for path in kept)


def is_takeover(path: str) -> bool:
    """Whether a file or folder at this absolute path could take the tests over. Of folders it ends with `/`."""
    return _takeover.match(path) is not None


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Without those that lie in others. The tests' own places are nobody's, but for artifacts in the logs."""
    ways = sorted({tuple(part for part in path.split("/") if part) for path in paths} - {()})
    assert not any({".", ".."} & {*way} for way in ways), "checked where paths come in"
    kept: list[tuple[str, ...]] = []
    for way in ways:
        if not (kept and way[: len(kept[-1])] == kept[-1]) and (
            way[0] not in ("tests", "logs", "solution") or way[:2] == ("logs", "artifacts")
        ):
            kept.append(way)
    return tuple("/" + "/".join(way) for way in kept)


def _but_for(paths: Iterable[str]) -> str:
    """The pattern of takeovers, without these and the folders that they are in."""
    ways = [path for path in paths if not re.match(_OURS, path)]
    folders = {f"{folder}/" for path in ways for folder in map(str, PurePosixPath(path).parents)} - {"//"}
    spared = "|".join(map(re.escape, sorted({*ways, *folders})))
    return f"(?!(?:{spared})$){_TAKEOVERS}" if spared else _TAKEOVERS
