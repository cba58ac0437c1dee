"""From the forms of data that users pass to combined batches, ahead of the loop.

:class:`LengthBuckets` makes batches of samples of like length, for a DataLoader.
"""

# ``adapters.get_data_adapter`` makes a ``source.DataAdapter`` of arrays, tables, datasets and
# loaders, and ``pipeline.BatchPipeline`` yields its executions. These two and ``sharding`` are what
# rooms above use. Nothing here runs a program; a batch that was yielded is not changed any more.

from ipufit.data.length_buckets import LengthBuckets

__all__ = ["LengthBuckets"]
