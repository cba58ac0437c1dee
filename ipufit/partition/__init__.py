"""Models over several IPUs: which part is on which, layers in parts, values computed again.

:func:`serialize` lets layers compute in parts, and :func:`to_dense` puts them together again; see
docs/memory.md.

Which part is on which IPU is said by :class:`ipufit.Parallel`, and what is computed again by
:class:`ipufit.Memory`.
"""

# resolve.py makes a partition.Partition of the arguments of compile, cut_layers.py and
# serialization.py compute layers in parts; ipufit.tracing.stage_trace holds a forward pass against
# it. What is exported here is public; partition.py and request.py are light, all else is imported
# on use.

from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
