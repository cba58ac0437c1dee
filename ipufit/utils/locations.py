"""Where ipufit's own source lies, to tell its frames from the user's."""

import os

__all__ = ["PACKAGE"]

# The folder of the package, with a separator at its end, as code objects name their files.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
