"""Which users of this machine the users in the namespace of a parent and its sandboxes are.

The identities of sandboxes, and the users that an agent may become, are the same numbers outside. All others, root
too, are ids that nobody else has. Only what imports nothing is imported.
"""

from orchestrator.launch.uids import FIRST_OF_RANGES, FIRST_UID, LAST_UID, RANGE_IDS, SLOTS

_RANGES = SLOTS * RANGE_IDS
_OWN = FIRST_OF_RANGES + _RANGES
# (inside, outside, how many)
_IDS = (
    (0, _OWN, FIRST_UID),
    (FIRST_UID, FIRST_UID, LAST_UID + 1 - FIRST_UID),
    (LAST_UID + 1, _OWN + LAST_UID + 1, RANGE_IDS - LAST_UID - 1),
    (FIRST_OF_RANGES, FIRST_OF_RANGES, _RANGES),
)
ID_RANGES = [dict(zip(("containerID", "hostID", "size"), ids, strict=True)) for ids in _IDS]
ID_MAP = "\n".join(" ".join(map(str, ids)) for ids in _IDS)
NOBODY = _OWN + LAST_UID  # it is mapped to none
