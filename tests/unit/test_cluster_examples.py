"""examples/cluster: what its files must have for a node to work."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.launch.channels import socket_fits
from orchestrator.launch.names import DEFAULT_IMAGE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
RAY = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())["ray"]

Manifest = Mapping[str, Any]


def _manifests() -> dict[str, Manifest]:
    return {told["kind"]: told for told in yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text("utf-8"))}


CLUSTER = _manifests()["RayCluster"]["spec"]
HEAD = CLUSTER["headGroupSpec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
POD = WORKERS["template"]["spec"]
(NODE,) = POD["containers"]
ENGINE, PULL = POD["initContainers"]


def environ(container: Manifest) -> dict[str, str]:
    return {told["name"]: told["value"] for told in container["env"]}


def volume_of(container: Manifest, path: str) -> str:
    """The volume that holds the path in this container."""
    mounts = {told["mountPath"]: told["name"] for told in container["volumeMounts"]}
    return next(mounts[str(place)] for place in (Path(path), *Path(path).parents) if str(place) in mounts)


def resources(group: Manifest) -> object:
    """As `ray start` gets it: KubeRay writes a command line for a shell."""
    (told,) = shlex.split(f"--resources={group['rayStartParams'].get('resources', '{}')}")
    return json.loads(told.removeprefix("--resources="))


def test_workers_carry_out_rollouts_and_the_head_does_not() -> None:
    assert resources(WORKERS) == {"sandbox": 1}
    assert resources(HEAD) == {}


def test_the_engine_finds_sockets_where_the_host_actor_makes_them() -> None:
    sockets = environ(NODE)["TMPDIR"]
    assert volume_of(NODE, sockets) == volume_of(ENGINE, sockets)
    assert socket_fits(Path(sockets))


def test_the_host_actor_and_the_pull_find_the_engine() -> None:
    host = environ(NODE)["DOCKER_HOST"]
    assert f"--host={host}" in ENGINE["args"]
    assert f"--host={host}" in PULL["command"]
    assert f"--host={host}" in ENGINE["startupProbe"]["exec"]["command"]
    path = host.removeprefix("unix://")
    assert volume_of(NODE, path) == volume_of(ENGINE, path) == volume_of(PULL, path)
    assert f"--group={NODE['securityContext']['runAsGroup']}" in ENGINE["args"]


def test_the_engine_outlives_ray_and_the_pod_the_drain() -> None:
    assert ENGINE["restartPolicy"] == "Always"
    assert float(environ(NODE)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < POD["terminationGracePeriodSeconds"]


def test_the_engine_alone_is_privileged_and_the_head_alone_has_keys() -> None:
    text = (FOLDER / "kuberay.yaml").read_text("utf-8")
    assert text.count("privileged: true") == 1
    assert ENGINE["securityContext"] == {"privileged": True}
    assert "secretRef" in json.dumps(HEAD)
    assert not any(word in json.dumps(WORKERS) for word in ("secretRef", "secretKeyRef", "secretName"))


def test_only_pods_of_the_cluster_may_speak_to_them() -> None:
    manifests = _manifests()
    policy = manifests["NetworkPolicy"]["spec"]
    name = {"matchLabels": {"ray.io/cluster": manifests["RayCluster"]["metadata"]["name"]}}
    assert policy["podSelector"] == name
    assert policy["ingress"] == [{"from": [{"podSelector": name}]}]


def test_versions_are_those_of_this_package() -> None:
    version = DEFAULT_IMAGE.rpartition(":")[2]
    dockerfile = (FOLDER / "Dockerfile").read_text("utf-8")
    assert CLUSTER["rayVersion"] == RAY
    assert f"\nFROM rayproject/ray:{RAY}-py3" in dockerfile
    assert PULL["command"][-1] == f"REGISTRY/{DEFAULT_IMAGE}"
    (image,) = {pod["template"]["spec"]["containers"][0]["image"] for pod in (HEAD, WORKERS)}
    assert image == f"REGISTRY/rollout-orchestrator-ray:{version}"
    assert image in dockerfile
