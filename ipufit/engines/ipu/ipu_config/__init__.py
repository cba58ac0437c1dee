"""IPUConfig: the configuration files of optimum-graphcore, read, written and turned into plans.

``parameters`` has their table, ``reading`` checks values, ``migrations`` knows the names of
earlier releases, ``serialization`` files and the Hub, and ``report`` what a parameter does on an
engine. A new parameter needs a row in ``parameters`` and one in ``report``; the rest stays.
"""

from ipufit.engines.ipu.ipu_config.config import IPUConfig
from ipufit.engines.ipu.ipu_config.parameters import IpuLayout

__all__ = ["IPUConfig", "IpuLayout"]
