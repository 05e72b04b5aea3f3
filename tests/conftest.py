"""How many examples a property is tried with: few in `make test`, many in `make test-long`."""

from hypothesis import settings

settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("quick")
