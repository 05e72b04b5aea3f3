"""Parents of forked sandboxes: when one is started, renewed and ended."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from orchestrator.errors import LaunchError, SandboxLostError
from orchestrator.launch.oci import parents
from orchestrator.launch.oci.mounts import PARENT_ROOT
from orchestrator.launch.oci.parent_ids import ID_RANGES, NOBODY
from orchestrator.launch.oci.parents import Parents, parent_bundle
from orchestrator.launch.uids import FIRST_OF_RANGES, FIRST_UID, LAST_UID, RANGE_IDS, UidPair


class Started:
    """What was started and removed, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.live: list[str] = []
        self.fails = False

    async def start(self, name: str) -> None:
        await asyncio.sleep(0)
        self.names.append(name)
        self.live.append(name)
        if self.fails:
            raise LaunchError("no")

    async def remove(self, name: str) -> None:
        self.live.remove(name)


@pytest.fixture
def started() -> Started:
    return Started()


async def test_there_is_one_parent_however_many_ask_at_once(started: Started) -> None:
    made = Parents(started.start, started.remove)
    names = await asyncio.gather(*(made.lease() for _ in range(5)))
    assert [*set(names)] == started.names == started.live


async def test_a_parent_is_renewed_and_ends_with_its_last_child(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parents, "MOST_FORKS", 2)
    made = Parents(started.start, started.remove)
    first, again, second = [await made.lease() for _ in range(3)]
    assert first == again != second
    await made.release(first)
    assert started.live == [first, second]
    await made.release(first)
    assert started.live == [second]
    await made.release(second)
    assert started.live == [second], "the newest is kept for the next one"


async def test_a_parent_that_nobody_has_ends_when_it_is_renewed(started: Started) -> None:
    now_s = 0.0
    made = Parents(started.start, started.remove, clock=lambda: now_s)
    old = await made.lease()
    await made.release(old)
    now_s = parents.MOST_S + 1
    new = await made.lease()
    assert new != old
    assert started.live == [new]


@pytest.mark.parametrize("how", ["ended", "lost"])
async def test_nothing_more_is_forked_from_one_that_has_ended(started: Started, how: str) -> None:
    made = Parents(started.start, started.remove)
    first = await made.lease()
    watched = made.all[first]
    watched.ended(9, "") if how == "ended" else watched.lose(SandboxLostError("gone"))
    second = await made.lease()
    assert second != first
    await made.release(first)
    assert started.live == [second]


async def test_one_that_does_not_start_is_removed_and_the_next_lease_tries_again(started: Started) -> None:
    made = Parents(started.start, started.remove)
    started.fails = True
    with pytest.raises(LaunchError):
        await made.lease()
    assert (started.live, made.all) == ([], {})
    started.fails = False
    assert await made.lease() in started.live


def test_a_parent_has_nothing_of_a_task_and_no_right_outside_of_its_user_namespace() -> None:
    config = parent_bundle("/runtime", "/group")
    assert config["root"] == {"path": PARENT_ROOT, "readonly": True}
    sources = [told["source"] for told in config["mounts"] if told["type"] == "bind"]
    assert sources == ["/runtime"]
    assert {"type": "user"} in config["linux"]["namespaces"]
    assert config["process"]["noNewPrivileges"]
    assert config["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    assert all(told["hostID"] != 0 for told in config["linux"]["uidMappings"])


def test_identities_are_the_same_numbers_outside_and_all_others_are_nobodys() -> None:
    outside = {told["containerID"]: told["hostID"] for told in ID_RANGES}
    assert outside[FIRST_UID] == FIRST_UID
    assert outside[FIRST_OF_RANGES] == FIRST_OF_RANGES
    last_range = UidPair(LAST_UID - 1, LAST_UID).first_of_range + RANGE_IDS
    assert outside[0] >= last_range
    assert max(told["hostID"] + told["size"] for told in ID_RANGES) < 1 << 31
    inside = sorted((told["containerID"], told["containerID"] + told["size"]) for told in ID_RANGES)
    assert all(end <= first for (_, end), (first, _) in pairwise(inside))
    assert not any(told["hostID"] <= NOBODY < told["hostID"] + told["size"] for told in ID_RANGES)
