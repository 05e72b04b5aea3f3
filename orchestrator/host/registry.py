"""Which hosts a run gets, by `env.cluster`. No other module of the core names a cluster."""

from contextlib import AsyncExitStack

from orchestrator.errors import ConfigError
from orchestrator.host.base import Hosts
from orchestrator.host.open import open_local
from orchestrator.host.setup import HostSetup


async def open_hosts(setup: HostSetup, stack: AsyncExitStack) -> Hosts:
    """This machine, or the nodes of a cluster; `stack` closes them. Raises ConfigError, EnvironmentUnusable."""
    if setup.sampler is not None:
        _check_sampler(setup)
    if setup.config.env.cluster == "ray":
        from orchestrator.cluster.nodes import open_nodes

        return await open_nodes(setup, stack)
    return await open_local(setup, stack)


def _check_sampler(setup: HostSetup) -> None:
    """Raises ConfigError for settings that contradict completions sampled by the program itself."""
    config = setup.config
    if any(server.base_url for server in config.openai):
        raise ConfigError("openai.base_url: the program samples the completions itself; leave it out")
    if config.env.cluster != "none":
        raise ConfigError("env.cluster: the program samples in this process; leave it at none")
    if config.env.token_source == "retokenize" or (config.env.tokenizer_name or "").lower() == "none":
        raise ConfigError(
            "env.tokenizer_name: the program samples token ids; set it to the tokenizer of your model's ids"
        )
