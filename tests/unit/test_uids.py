from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.launch.uids import FIRST_UID, LAST_UID, SLOTS, UidSlots


def test_no_two_live_sandboxes_share_a_uid() -> None:
    slots = UidSlots()
    with ThreadPoolExecutor(8) as pool:
        pairs = list(pool.map(lambda _: slots.take(), range(2000)))
    uids = [uid for pair in pairs for uid in (pair.runner, pair.worker)]
    assert len(set(uids)) == 4000
    assert min(uids) >= FIRST_UID
    assert max(uids) <= LAST_UID


def test_released_pair_comes_round_last() -> None:
    slots = UidSlots(start=SLOTS - 1)
    first = slots.take()
    slots.release(first)
    others = [slots.take() for _ in range(SLOTS - 1)]
    assert first not in others
    assert slots.take() == first


def test_running_out_is_an_error_and_not_a_shared_uid() -> None:
    slots = UidSlots()
    for _ in range(SLOTS):
        slots.take()
    with pytest.raises(RuntimeError):
        slots.take()
