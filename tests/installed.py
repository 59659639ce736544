"""Cases of tests that need a feature: tests outside of tests/features/ pass without any feature."""

from collections.abc import Iterable
from typing import TypeVar

import pytest

from thinker.runtime.registry import features

Case = TypeVar("Case")
NAMES = {feature.name for feature in features()}


def if_installed(feature: str, *cases: Case) -> Iterable[Case]:
    """The cases, or none if the feature has been deleted."""
    return cases if feature in NAMES else ()


def needs(feature: str) -> pytest.MarkDecorator:
    """A mark for a test that is skipped if the feature has been deleted."""
    return pytest.mark.skipif(feature not in NAMES, reason=f"needs the feature {feature}")
