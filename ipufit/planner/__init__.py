"""What a model takes on IPUs by estimate, and the partition whose slowest stage is the fastest.

It measures a module layer by layer through a recording without values. What a partition is, and
how a forward follows one, lives below, in ``partition``.
"""
