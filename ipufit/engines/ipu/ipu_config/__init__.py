"""IPUConfig: the configuration files of optimum-graphcore, read, written and turned into plans.

``parameters`` has their table, ``reading`` checks values and knows the names of earlier releases,
``serialization`` is for files and the Hub, and ``settings`` reads what a configuration fixes of a
run. A new parameter needs a row in ``parameters``, one in ``engines/ipu/effects``, and what it
fixes in ``settings``; the rest stays.
"""

from ipufit.engines.ipu.ipu_config.config import IPUConfig
from ipufit.engines.ipu.ipu_config.parameters import IpuLayout

__all__ = ["IPUConfig", "IpuLayout"]
