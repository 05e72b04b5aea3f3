"""Parents of forked sandboxes: when one is started, renewed and ended."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from orchestrator.errors import LaunchError, SandboxLostError
from orchestrator.launch.hardening import OPEN_FILES
from orchestrator.launch.oci import parents
from orchestrator.launch.oci.fork_bundles import acting_at_start, parent_bundle, template_config
from orchestrator.launch.oci.mounts import PARENT_ROOT
from orchestrator.launch.oci.parent_ids import SHARED_BASE, parent_ids
from orchestrator.launch.oci.parents import Parents
from orchestrator.launch.oci.runtime import Unfit
from orchestrator.launch.oci.user_namespace import UserNamespace, id_range
from orchestrator.launch.uids import FIRST_OF_RANGES, FIRST_UID, LAST_UID, RANGE_IDS, UidPair
from orchestrator.types import SandboxSpec
from tests.fakes.plans import a_sandbox

IN_FLIGHT = 3 + 16 + 8  # of a request: the usual, mounts and control groups; with what a server has itself


def test_a_parent_may_watch_all_sandboxes_that_it_makes() -> None:
    assert parents.MOST_FORKS + IN_FLIGHT < OPEN_FILES


class Started:
    """What was started and removed, in order. `removing`: set at the first removal; none ends while `going` is
    clear."""

    def __init__(self) -> None:
        self.removing, self.going = asyncio.Event(), asyncio.Event()
        self.going.set()
        self.names: list[str] = []
        self.kinds: list[SandboxSpec | None] = []
        self.live: list[str] = []
        self.fails, self.error = False, LaunchError("no")

    async def start(self, name: str, kind: SandboxSpec | None) -> None:
        await asyncio.sleep(0)
        self.names.append(name)
        self.kinds.append(kind)
        self.live.append(name)
        if self.fails:
            raise self.error

    async def remove(self, name: str) -> None:
        self.removing.set()
        await self.going.wait()
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


def kind(module: str) -> SandboxSpec:
    return a_sandbox("image", preload=(module,))


async def test_sandboxes_with_modules_of_their_image_have_parents_of_their_own(started: Started) -> None:
    made = Parents(started.start, started.remove)
    leases = [await made.lease(each) for each in (None, kind("a"), kind("b"), kind("a"), None)]
    assert leases[0] == leases[4]
    assert leases[1] == leases[3]
    assert len({*leases}) == 3
    assert started.kinds == [None, kind("a"), kind("b")]


async def test_a_kind_whose_parent_failed_is_tried_again_after_minutes_and_ever_later(started: Started) -> None:
    now_s = 0.0
    made = Parents(started.start, started.remove, clock=lambda: now_s)
    started.fails = True
    failures = await asyncio.gather(*(made.lease(kind("a")) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in failures] == ["no"] * 3
    assert len(started.names) == 1, "those that waited do not try it again"
    for later_s, tries in ((299, 1), (301, 2), (700, 2), (902, 3)):
        now_s = later_s
        with pytest.raises(LaunchError):
            await made.lease(kind("a"))
        assert len(started.names) == tries
    now_s, started.fails = 5000, False
    assert await made.lease(kind("a")) == started.names[-1]


async def test_nobody_waits_for_another_one_s_second_try(started: Started) -> None:
    now_s = 0.0
    made = Parents(started.start, started.remove, clock=lambda: now_s)
    started.fails = True
    with pytest.raises(LaunchError):
        await made.lease(kind("a"))
    now_s, started.fails = 301, False
    tries = asyncio.create_task(made.lease(kind("a")))
    await asyncio.sleep(0)
    with pytest.raises(LaunchError, match="no"):
        await made.lease(kind("a"))
    assert await tries == await made.lease(kind("a"))


async def test_a_kind_that_no_parent_can_have_is_not_tried_again(started: Started) -> None:
    now_s = 0.0
    made = Parents(started.start, started.remove, clock=lambda: now_s)
    started.fails, started.error = True, Unfit("it starts threads")
    for later_s in (0, 1e9):
        now_s = later_s
        with pytest.raises(LaunchError, match="it starts threads"):
            await made.lease(kind("a"))
    assert len(started.names) == 1


async def test_a_kind_of_which_no_sandbox_gets_ready_does_without_a_parent(started: Started) -> None:
    made = Parents(started.start, started.remove)
    for _ in range(parents.MOST_UNREADY):
        await made.release(await made.lease(kind("a")), "it ended with 9")
    with pytest.raises(LaunchError, match="what is forked with it does not get ready: it ended with 9"):
        await made.lease(kind("a"))
    assert (started.live, len(started.names)) == ([], 1)
    assert await made.lease(kind("b")) in started.live


async def test_one_that_gets_ready_speaks_for_its_parent_and_one_that_is_cancelled_says_nothing(
    started: Started,
) -> None:
    made = Parents(started.start, started.remove)
    for why_unready in ("no", "", "no", None, None, "", "no"):
        await made.release(await made.lease(kind("a")), why_unready)
    assert await made.lease(kind("a")) == started.names[0]


async def test_a_few_that_do_not_get_ready_among_many_cost_no_parent(started: Started) -> None:
    made = Parents(started.start, started.remove)
    leases = [await made.lease(kind("a")) for _ in range(10)]
    for lease in leases[:5]:
        await made.release(lease, "late")
    assert await made.lease(kind("a")) == leases[0]
    for lease in leases[5:8]:
        await made.release(lease, "late")
    with pytest.raises(LaunchError, match="late"):
        await made.lease(kind("a"))
    assert started.live == leases[:1], "others still have it"


async def test_the_end_of_a_parent_counts_once_however_many_were_starting(started: Started) -> None:
    made = Parents(started.start, started.remove)
    for _ in range(parents.MOST_UNREADY):
        leases = [await made.lease(kind("a")) for _ in range(5)]
        made.all[leases[0]].ended(9, "")
        for lease in leases:
            await made.release(lease, "its parent has ended")
    assert len(started.names) == parents.MOST_UNREADY
    with pytest.raises(LaunchError, match="its parent has ended"):
        await made.lease(kind("a"))


async def test_one_sandbox_tries_again_for_all_of_its_kind(started: Started) -> None:
    now_s = 0.0
    made = Parents(started.start, started.remove, clock=lambda: now_s)
    for _ in range(parents.MOST_UNREADY):
        await made.release(await made.lease(kind("a")), "no")
    for later_s in (301.0, 1000.0):
        now_s = later_s
        trial = await made.lease(kind("a"))
        with pytest.raises(LaunchError, match="no"):
            await made.lease(kind("a"))
        await made.release(trial, "still no")
        with pytest.raises(LaunchError, match="still no"):
            await made.lease(kind("a"))
    now_s = 3000.0
    trial = await made.lease(kind("a"))
    await made.release(trial)
    assert await made.lease(kind("a")) == trial, "it was cancelled: this is the next to try"
    await made.release(trial, "")
    assert {await made.lease(kind("a")) for _ in range(3)} == {trial}


async def test_an_old_parent_serves_on_where_no_other_can_be_had(started: Started) -> None:
    now_s = 0.0
    made = Parents(started.start, started.remove, clock=lambda: now_s)
    old = await made.lease(kind("a"))
    now_s, started.fails = parents.MOST_S + 1, True
    assert await made.lease(kind("a")) == old
    now_s, started.fails = 2 * parents.MOST_S, False
    assert await made.lease(kind("a")) != old
    await made.release(old)
    await made.release(old)
    assert old not in started.live


async def test_a_slow_import_of_one_kind_holds_up_no_other(started: Started) -> None:
    going = asyncio.Event()

    async def start(name: str, of: SandboxSpec | None) -> None:
        if of is not None:
            await going.wait()
        await started.start(name, of)

    made = Parents(start, started.remove)
    slow = asyncio.create_task(made.lease(kind("a")))
    await asyncio.sleep(0)
    assert await made.lease() in started.live
    going.set()
    await slow


async def test_the_parents_of_the_least_used_kind_end_first_and_not_before_their_children(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parents, "MOST_KINDS", 2)
    made = Parents(started.start, started.remove)
    first = await made.lease(kind("a"))
    second = await made.lease(kind("b"))
    await made.release(second)
    assert await made.lease(kind("a")) == first, "it is the last used"
    third = await made.lease(kind("c"))
    assert started.live == [first, third]
    await made.lease(kind("d"))
    assert first in started.live
    await made.release(first)
    assert first in started.live
    await made.release(first)
    assert first not in started.live
    await made.release(third)
    assert third in started.live, "the newest is kept for the next one"


async def test_a_kind_whose_parent_does_not_start_costs_the_others_nothing(started: Started) -> None:
    made = Parents(started.start, started.remove)
    plain = await made.lease()
    started.fails = True
    with pytest.raises(LaunchError):
        await made.lease(kind("a"))
    assert started.live == [plain] == [*made.all]
    assert await made.lease() == plain


async def test_a_lease_that_is_cancelled_while_others_end_counts_nothing_and_leaves_none_half_ended(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parents, "MOST_KINDS", 1)
    started.going.clear()
    made = Parents(started.start, started.remove)
    await made.release(await made.lease(kind("a")))
    leasing = asyncio.create_task(made.lease(kind("b")))
    await started.removing.wait()
    leasing.cancel()
    await asyncio.sleep(0)
    started.going.set()
    with pytest.raises(asyncio.CancelledError):
        await leasing
    assert [*made.all] == started.live, "the first has ended"
    assert [parent.live for parent in made.all.values()] == [0]


async def test_a_parent_that_is_renewed_is_not_ended_before_it_is_had(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parents, "MOST_KINDS", 1)
    monkeypatch.setattr(parents, "MOST_FORKS", 1)
    started.going.clear()
    made = Parents(started.start, started.remove)
    await made.release(await made.lease(kind("a")))
    renewing = asyncio.create_task(made.lease(kind("a")))
    await started.removing.wait()
    other = asyncio.create_task(made.lease(kind("b")))
    for _ in range(10):
        await asyncio.sleep(0)
    started.going.set()
    renewed = await renewing
    await other
    assert renewed in started.live
    await made.release(renewed)


def test_a_parent_has_nothing_of_a_task_and_no_right_outside_of_its_user_namespace() -> None:
    config = parent_bundle("/runtime", "/group", parent_ids(None), SHARED_BASE)
    assert config["root"] == {"path": str(SHARED_BASE / PARENT_ROOT), "readonly": True}
    sources = [told["source"] for told in config["mounts"] if told["type"] == "bind"]
    assert sources == ["/runtime"]
    assert {"type": "user"} in config["linux"]["namespaces"]
    assert config["process"]["noNewPrivileges"]
    assert config["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    assert all(told["hostID"] != 0 for told in config["linux"]["uidMappings"])


def test_a_parent_is_asked_for_no_limit_that_cannot_be_set_and_was_waived() -> None:
    """A runtime would refuse."""
    waived = frozenset({"memory", "swap", "cpus", "pids"})
    linux = parent_bundle("/runtime", "/group", parent_ids(None), SHARED_BASE, unlimited=waived)["linux"]
    assert "cgroupsPath" not in linux
    assert [*linux["resources"]] == ["devices"]


def test_a_template_gets_the_places_of_a_sandbox_without_its_channel_and_groups() -> None:
    places = ["/proc", "/sys/fs/cgroup", "/workspace", "/run/channel", "/run/channel/box", "/opt/sandbox"]
    config = {"mounts": [{"destination": place} for place in places], "process": {"args": ["x"]}}
    told = template_config(config, (7, 8))
    assert [mount["destination"] for mount in told["mounts"]] == ["/proc", "/workspace", "/opt/sandbox"]
    assert told["process"] == {"args": ["x"], "user": {"uid": 7, "gid": 8}}
    rooted = parent_bundle("/runtime", "/group", parent_ids(None), SHARED_BASE, rooted=True)
    assert rooted["process"]["args"][-1] == "--rooted"


@pytest.mark.parametrize(
    ("variable", "acts"),
    [
        ("LD_DEBUG=all", True),
        ("LD_LIBRARY_PATH=/usr/local/cuda/lib64", False),
        ("MALLOC_ARENA_MAX=2", True),
        ("PYTHONWARNINGS=ignore,error::DeprecationWarning", False),
        ("PYTHONWARNINGS=ignore,default:told:of.a.module", True),
        ("PYTHONIOENCODING=UTF-8", False),
        ("PYTHONIOENCODING=:replace", False),
        ("PYTHONIOENCODING=latin-1", True),
        ("PYTHONUTF8=1", False),
        ("PYTHONUTF8=0", True),
        ("PYTHONOPTIMIZE=1", True),
        ("PYTHONOPTIMIZE=", False),
        ("PYTHON_VERSION=3.13.1", False),
        ("PYTHONDONTWRITEBYTECODE=1", False),
        ("PYTHONPATH=/theirs", False),
    ],
)
def test_variables_that_act_on_a_program_s_start_are_told_apart(variable: str, acts: bool) -> None:
    name, _, value = variable.partition("=")
    assert acting_at_start({name: value, "PATH": "/bin"}) == ([name] if acts else [])


def test_identities_are_the_same_numbers_outside_and_all_others_are_nobodys() -> None:
    ids = parent_ids(None)
    assert ids.users == ids.groups
    outside = {told["containerID"]: told["hostID"] for told in ids.users}
    assert outside[FIRST_UID] == FIRST_UID
    assert outside[FIRST_OF_RANGES] == FIRST_OF_RANGES
    last_range = UidPair(LAST_UID - 1, LAST_UID).first_of_range + RANGE_IDS
    assert outside[0] >= last_range
    assert max(told["hostID"] + told["size"] for told in ids.users) < 1 << 31
    inside = sorted((told["containerID"], told["containerID"] + told["size"]) for told in ids.users)
    assert all(end <= first for (_, end), (first, _) in pairwise(inside))
    assert not any(told["hostID"] <= ids.owner < told["hostID"] + told["size"] for told in ids.users)


def test_an_ordinary_users_are_what_they_are_in_its_other_sandboxes_a_line_for_each_range() -> None:
    users = [id_range(0, 200_000, 1000), id_range(1000, 300_000, 500), id_range(1500, 1234, 1)]
    ids = parent_ids(UserNamespace(users, users[:1]))
    assert ids.maps == ["0 0 1000\n1000 1000 500\n1500 1500 1", "0 0 1000"]
    assert (ids.owner, ids.shifts) == (0, False)
