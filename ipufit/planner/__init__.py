"""Estimates of what a model takes on IPUs, and the partition whose slowest stage is the fastest.

It measures a module layer by layer through a recording without values. What a partition is, and
how a forward follows one, lives below, in ``partition``. ``partition_plan.PartitionPlan`` is the
result; it and ``planning`` are imported when they are used, as a plain fit needs neither.
"""
