"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The same examples in every run, so that no run fails for a change that is not its own. `HYPOTHESIS_PROFILE=explore` looks for
# new ones. Hypothesis reads its table of characters when first asked for text, which is a second that no test is slow by.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "explore", deadline=None, max_examples=5_000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
