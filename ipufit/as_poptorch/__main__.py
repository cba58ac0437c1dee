"""``python -m ipufit.as_poptorch train.py``, or alone for the folders that PYTHONPATH needs."""

import os
import sys

from ipufit.cli.main import main
from ipufit.utils.poptorch_sdk import install

__all__: "list[str]" = []

if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(["run", *sys.argv[1:]])
    else:
        install(os.environ.get("IPUFIT_POPTORCH", "auto"))
        print(os.environ["PYTHONPATH"])
