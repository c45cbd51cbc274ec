"""Means that a developer's machine may lack and CI's may not: RAVEL_REQUIRE lists those that must be there, as for required.h."""
import os
import unittest


def skip_unless(there, means, why):
    """Skips a test or a class without the means; where they are required the test file fails."""
    if there:
        return lambda test: test
    if means in os.environ.get("RAVEL_REQUIRE", "").split(","):
        raise RuntimeError(f"{why}; RAVEL_REQUIRE lists {means}")
    return unittest.skip(why)
