"""The doctor at a cluster: every node makes the checks of a machine itself, all nodes at a time.

No image is sent, and nothing stays on a node.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.cluster.image import image_id, nowhere
from orchestrator.cluster.members import JOINING, first_nodes
from orchestrator.cluster.order import demand_same, settings_for_nodes, software
from orchestrator.cluster.remote import Link, ListedNode, NodeLost, Remote
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.doctor.finding import Finding, fail, ok, warn
from orchestrator.errors import EnvironmentUnusable
from orchestrator.settings.config import Config

NODE_S = 300.0  # for all of a node's answers; starting its actor and a sandbox may take 120 s each


async def check_cluster(config: Config, tokenizer: HubTokenizer | None) -> AsyncIterator[Finding]:
    """Checks the nodes of the settings' cluster. `tokenizer`: the run's, if there is one."""
    try:
        from orchestrator.cluster.link import RayLink

        link = RayLink(config.env.ray_address)
        await link.open()
    except EnvironmentUnusable as error:
        yield fail("cluster", str(error))
        return
    try:
        async for finding in check_nodes(config, tokenizer, link):
            yield finding
    finally:
        await link.close()


async def check_nodes(config: Config, tokenizer: HubTokenizer | None, link: Link) -> AsyncIterator[Finding]:
    """Checks the nodes that would carry out rollouts, all at a time. Those that answer first come first."""
    try:
        nodes = await first_nodes(link)
    except EnvironmentUnusable as error:
        yield fail("cluster", str(error))
        return
    yield ok("cluster", f"nodes with the resource `sandbox`: {', '.join(sorted(node.name for node in nodes))}")
    env = config.env
    image = await asyncio.to_thread(image_id, env.sandbox_image) if env.takes_docker else None
    name = env.tokenizer_name if tokenizer is None else tokenizer.name
    digest = None if tokenizer is None else await asyncio.to_thread(lambda: tokenizer.digest)
    doctor = _Doctor(settings_for_nodes(config, name), link, image, digest, await asyncio.to_thread(software))
    visits = [asyncio.create_task(doctor.visit(node), name=f"doctor at {node.name}") for node in nodes]
    try:
        for visit in asyncio.as_completed(visits):
            for finding in await visit:
                yield finding
    finally:
        for task in visits:
            task.cancel()
        await asyncio.gather(*visits, return_exceptions=True)


@dataclass(eq=False, slots=True)
class _Doctor:
    """Visits nodes, and compares them with this machine: `image` is its image's id, None if it has none."""

    config: Config
    link: Link
    image: str | None
    tokenizer_digest: str | None
    software: Mapping[str, str]
    _first: tuple[str, str] | None = None  # a node with an image, and the image's id
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(JOINING))

    async def visit(self, node: ListedNode) -> list[Finding]:
        """The findings on a node, at the latest after NODE_S; each text begins with its name."""
        findings: list[Finding] = []
        remote: Remote | None = None
        try:
            async with self._room, asyncio.timeout(NODE_S):
                remote = await self.link.start(node.node_id)
                async for finding in self._findings(node, remote):
                    findings.append(finding)  # noqa: PERF401 - kept if the next one never comes
        except TimeoutError:
            text = f"it has not answered for {NODE_S:g} s: look at the machine, or take it out of the cluster"
            findings.append(fail("node", text))
        except NodeLost as error:
            findings.append(fail("node", f"{error}; see `ray status`, and Ray's logs on the node"))
        finally:
            if remote is not None:
                remote.end()
        return [replace(finding, text=f"node {node.name}: {finding.text}") for finding in findings]

    async def _findings(self, node: ListedNode, remote: Remote) -> AsyncIterator[Finding]:
        if node.draining:
            yield warn("node", "it is leaving the cluster, and gets no rollouts")
        docker, image_comes = self.config.env.takes_docker, False
        inspection = await remote.look(self.config.env.sandbox_image, docker=docker)
        try:
            demand_same(inspection.software, self.software)
        except EnvironmentUnusable as error:
            yield fail("software", str(error))
            return  # as in a run, no key goes there
        yield ok("software", f"Python {self.software['python']}, packages and source are those of this machine")
        if docker:
            finding, image_comes = self._compare(node.name, inspection.image_id)
            yield finding
        for finding in await remote.examine(
            self.config, image_comes=image_comes, tokenizer_digest=self.tokenizer_digest
        ):
            yield finding

    def _compare(self, name: str, theirs: str | None) -> tuple[Finding, bool]:
        """(the finding, whether the image that rollouts will have is still to come), as a run judges."""
        image = self.config.env.sandbox_image
        if self.image is not None and theirs == self.image:
            return ok("image id", f"{_short(theirs)}, that of {image} on this machine"), False
        if self.image is not None:
            has = "it has no" if theirs is None else f"{_short(theirs)} is another"
            comes = f"it gets {_short(self.image)} from here when a run begins"
            return warn("image id", f"{has} {image}: {comes}"), True
        if theirs is None:
            return fail("image id", nowhere(image)), True
        first, first_id = self._first = self._first or (name, theirs)
        if theirs == first_id:
            return ok("image id", f"{_short(theirs)} is its {image}; this machine has none"), False
        others = f"{_short(first_id)} is that of node {first}"
        return fail("image id", f"{_short(theirs)} is its {image}, {others}: load the same one on both"), False


def _short(image_id: str) -> str:
    return image_id.removeprefix("sha256:")[:12]
