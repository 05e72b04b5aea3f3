"""What the keeper is asked for where a sandbox may write to its root, and who the agent is then. Pure.

The root is an overlay: the image and the layers over it, and a tmpfs of limited size that takes what is written.
The agent has a user namespace of its own, with ids that no other sandbox has, and may be root in it: it has power
over files and processes of these ids alone. `mounts` makes both; pid 1 gets the namespace as a descriptor.
"""

from collections.abc import Sequence
from typing import Any

from orchestrator.launch.base import State
from orchestrator.launch.difference import OPAQUE, OPAQUE_OF_USERS
from orchestrator.launch.hardening import Hardening
from orchestrator.launch.oci.store import StoredImage
from orchestrator.launch.oci.user_namespace import AGENT_ID, UserNamespace
from orchestrator.launch.uids import RANGE_IDS, UidPair
from orchestrator.types import SandboxSpec

_NAMESPACE_FD = 3  # the first that an OCI runtime hands on


def root_request(
    spec: SandboxSpec,
    image: StoredImage,
    hardening: Hardening,
    uids: UidPair,
    users: UserNamespace | None,
    over: Sequence[str] = (),
    state: State | None = None,
) -> dict[str, Any]:
    """What `Runtime.start` is told beside the bundle. `users`: of an ordinary user, who cannot shift ids: the
    user's files are the agent's as they are, and all agents have the same ids. `over`: layers that lie over all
    others, and under them the `state` of another sandbox."""
    assert hardening.root is not None
    maps = (f"0 {uids.first_of_range} {RANGE_IDS}",) * 2 if users is None else users.agent_maps
    return {
        "root": {
            "lowers": [*over, *spec.layers, str(image.root)],
            "size_bytes": hardening.root.size_bytes,
            "inodes": hardening.root.inodes,
            "on_disk": hardening.root.on_disk,
            "owner": uids.first_of_range if users is None else AGENT_ID,
            "shifted": users is None,
        },
        "agent": {
            "owner": uids.worker,
            "maps": maps,
            # The host of a state may stand still, and its processes count.
            "processes": hardening.worker_processes * (1 if state is None else 2),
        },
        **(
            {}
            if state is None
            else {"state": _state(state, len(over), OPAQUE if users is None else OPAQUE_OF_USERS)}
        ),
    }


def _state(state: State, at: int, mark: str) -> dict[str, Any]:
    scope = {"kept": state.kept, "dropped": state.dropped, "merged": state.merged, "mark": mark}
    of = [sandbox.sandbox_id for sandbox in state.sandboxes]
    return {"of": of, "at": at, "copied": state.copied, **scope}


def agent_arguments(uid: int, gid: int) -> tuple[str, ...]:
    """What `python -m sandbox` is told."""
    told = {"namespace": _NAMESPACE_FD, "uid": uid, "gid": gid}
    return tuple(text for name, value in told.items() for text in (f"--agent-{name}", str(value)))
