"""Estimators as scikit-learn has them: for pipelines, cross-validation and grid searches.

Needs the package scikit-learn, which is imported with it: ``pip install ipufit[sklearn]``. See
docs/scikit-learn.md.
"""

try:
    import sklearn as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ipufit.sklearn needs the package scikit-learn, which is not installed. Run: pip install "
        "ipufit[sklearn]"
    ) from error

from ipufit.sklearn.estimators import IpufitClassifier, IpufitRegressor
from ipufit.sklearn.search import GridSearchCV

__all__ = ["GridSearchCV", "IpufitClassifier", "IpufitRegressor"]
