"""warn_user: the line that a warning shows is not one of ipufit's."""

import contextlib
import warnings

from ipufit.utils.console import PACKAGE, warn_user

CODE = """
@contextlib.contextmanager
def block():
    warn_user("deep", DeprecationWarning)
    yield

def outer():
    with block():
        pass
"""


def test_a_warning_shows_the_line_that_called_the_package():
    """However many frames of the package and of its blocks lie between."""
    names = {"contextlib": contextlib, "warn_user": warn_user}
    exec(compile(CODE, f"{PACKAGE}deep.py", "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["outer"]()
    line = test_a_warning_shows_the_line_that_called_the_package.__code__.co_firstlineno + 6
    assert [(w.filename, w.lineno, w.category) for w in caught] == [
        (__file__, line, DeprecationWarning)
    ]
