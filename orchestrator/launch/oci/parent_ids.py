"""Which users of this machine the users in the namespace of a parent and its sandboxes are.

Where root makes it, the identities of sandboxes, and the users that an agent may become, are the same numbers
outside. All others, root too, are ids that nobody else has. Where an ordinary user makes it, all are what they are
in sandboxes that the OCI runtime starts.
"""

from pathlib import Path
from typing import NamedTuple

from orchestrator.launch.oci.user_namespace import AGENT_ID, Mapping, UserNamespace, id_range
from orchestrator.launch.uids import FIRST_OF_RANGES, FIRST_UID, LAST_UID, RANGE_IDS, SLOTS

# Every user may pass through it, as root of a parent's user namespace is unknown to this machine. It stays empty.
SHARED_BASE = Path("/run/rollout-orchestrator")
_RANGES = SLOTS * RANGE_IDS
_OWN = FIRST_OF_RANGES + _RANGES
_NOBODY = _OWN + LAST_UID


class ParentIds(NamedTuple):
    """`users`, `groups`: ranges, outside as the keeper sees them. `owner`: a uid, outside, that the namespace
    belongs to. `shifts`: whether an image must be shown with these ids. `first_agent`: who the root of an image
    is, inside."""

    users: list[Mapping]
    groups: list[Mapping]
    owner: int
    shifts: bool
    first_agent: int

    @property
    def maps(self) -> list[str]:
        """As in /proc/PID/uid_map and gid_map."""
        return ["\n".join(" ".join(map(str, ids.values())) for ids in each) for each in (self.users, self.groups)]


def parent_ids(users: UserNamespace | None) -> ParentIds:
    """`users`: those that there are for the keeper; None: all."""
    if users is not None:
        return ParentIds(
            _the_same(users.users), _the_same(users.groups), owner=0, shifts=False, first_agent=AGENT_ID
        )
    ranges = [
        id_range(0, _OWN, FIRST_UID),
        id_range(FIRST_UID, FIRST_UID, LAST_UID + 1 - FIRST_UID),
        id_range(LAST_UID + 1, _OWN + LAST_UID + 1, RANGE_IDS - LAST_UID - 1),
        id_range(FIRST_OF_RANGES, FIRST_OF_RANGES, _RANGES),
    ]
    return ParentIds(ranges, ranges, owner=_NOBODY, shifts=True, first_agent=0)  # the owner is mapped to none


def _the_same(ranges: list[Mapping]) -> list[Mapping]:
    """Not one range: the kernel takes none that spans two of those around it."""
    return [id_range(ids["containerID"], ids["containerID"], ids["size"]) for ids in ranges]
