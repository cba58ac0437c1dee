"""``python -m ipufit``: the same as the command ``ipufit``."""

from ipufit.cli.main import main

if __name__ == "__main__":
    main()
