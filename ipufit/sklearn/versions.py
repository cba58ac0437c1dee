"""Names of scikit-learn that older versions lack; 1.3 is the oldest that ipufit works with."""

from __future__ import annotations

from typing import Any

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before 1.6

    def validate_data(estimator: Any, *args: Any, **options: Any) -> Any:
        """Check data, and what it has in common with that of ``fit``; a method before 1.6."""
        return estimator._validate_data(*args, **options)


__all__ = ["validate_data"]
