"""A LightningModule in ipufit and in Lightning itself: without Lightning, all of it is skipped."""

import warnings

import pytest

with warnings.catch_warnings():
    # Its imports of today's torch warn.
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch")
