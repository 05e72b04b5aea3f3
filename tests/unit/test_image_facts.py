"""What `image check` tells of an image's description and packages."""

from __future__ import annotations

import stat

import pytest

from orchestrator.launch.image.facts import image_facts, package_facts, unfit

FILE, FOLDER, LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK


def test_what_is_not_used_and_not_passed_on_is_named() -> None:
    config = {
        "Entrypoint": ["/x"],
        "User": "app",
        "Healthcheck": {"Test": ["CMD"]},
        "Env": ["LD_PRELOAD=/x", "A=b"],
    }
    facts = {fact.name: fact for fact in image_facts({"Config": config}, "digest")}
    assert facts["not used of it"].result == "Entrypoint, Healthcheck, User (but with a writable root)"
    assert "without LD_PRELOAD" in facts["environment"].result
    assert not any(fact.cure for fact in facts.values())


@pytest.mark.parametrize(
    ("entries", "cure"),
    [
        ([("/opt/packages", FOLDER | 0o755), ("/opt/packages/a.py", FILE | 0o644)], None),
        ([("/opt/packages", FOLDER | 0o755), ("/opt/packages/a.py", LINK | 0o777)], None),
        ([("/opt/sandbox/packages", FOLDER | 0o755)], None),
        ([("/opt/packages", FOLDER | 0o700)], "chmod"),
        ([("/opt/packages/a.py", FILE | 0o600)], "chmod"),
        ([("/opt/sandbox/packages/a.py", FILE | 0o644)], "/opt/packages now"),
        ([("/opt/sandbox/preload.packed", FILE | 0o644)], "/opt/packages now"),
    ],
)
def test_packages_must_be_readable_and_in_their_place(entries: list[tuple[str, int]], cure: str | None) -> None:
    (fact,) = package_facts(entries)
    assert (fact.cure is None) == (cure is None), fact
    assert cure is None or cure in str(fact.cure)


def test_an_image_without_a_description_of_its_machine_is_taken() -> None:
    assert unfit("i", {}) is None
    assert unfit("i", {"RootFS": {"Layers": ["1"]}, "Os": "linux"}) is None
    assert unfit("i", {"RootFS": {"Type": "layers"}}) == "the image i has no root file system"
