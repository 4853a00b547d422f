"""Settings of all tests: what a busy machine does to one example of a property is no failure."""

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:  # a machine with a GPU may have only what its tests need
    from hypothesis import HealthCheck, settings

    settings.register_profile("terrella", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("terrella")
