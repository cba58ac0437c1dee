"""IPUConfig: the configuration files of optimum-graphcore, read, written and turned into plans."""

from ipufit.engines.ipu.ipu_config.config import IPUConfig
from ipufit.engines.ipu.ipu_config.partition import Partition

__all__ = ["IPUConfig", "Partition"]
