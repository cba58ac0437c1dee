"""How many examples show a property each of whose examples takes its time."""

import hypothesis

from tests.conftest import EXAMPLES


def few(count, exhaustive=None):
    """Settings of so many examples; with --exhaustive of others so many, or as of any property."""
    everyday = hypothesis.settings.default.max_examples
    if everyday > EXAMPLES:
        count = exhaustive or everyday
    return hypothesis.settings(max_examples=count)
