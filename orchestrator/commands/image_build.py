"""`orchestrator image build`: the image that sandboxes are made from."""

import asyncio
import sys
from functools import partial

from orchestrator.launch.image.build import ensure_image
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.settings.config import Config


def run(config: Config, base_image: str | None, force: bool, with_: str | None, oci: bool) -> int:
    """0: the image is there. Raises EnvironmentUnusable."""
    tag, extras = config.env.sandbox_image, () if with_ is None else (with_,)
    if with_ is not None and tag == DEFAULT_IMAGE:
        tag = f"{tag}-{with_}"  # the slim image keeps its tag
    ensure = ensure_image
    if oci:
        from orchestrator.launch.oci.build import ensure_stored
        from orchestrator.launch.oci.store import ImageStore

        ensure = partial(ensure_stored, store=ImageStore(), runtime=config.env.oci_runtime)
    say = partial(print, file=sys.stderr, flush=True)
    image = asyncio.run(ensure(tag, base_image=base_image, extras=extras, force=force, progress=say))
    built = f"built in {image.seconds:.0f} s" if image.fresh else "up to date"
    print(
        f"{image.tag} {built}: {image.image_id[:19]}, {image.size_bytes / 1e6:.0f} MB, "
        f"Python {image.python}, on {image.base}"
    )
    return 0
