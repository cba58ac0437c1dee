"""What several tests are held against is made once, on each engine."""

import functools
import os


def once_per_engine(function):
    """Keep the results of a function, by its arguments and the engine of the test."""

    @functools.lru_cache(maxsize=None)
    def kept(engine, *args):
        return function(*args)

    return lambda *args: kept(os.environ.get("IPUFIT_ENGINE"), *args)
