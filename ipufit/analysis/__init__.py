"""Analyses of a model that is not trained: checks, comparisons, plans of partitions, tuners.

Everything here stands above training: it runs short programs of its own, or none, and leaves the
user's module as it was. Only the methods of ``Model`` import it, when they are called.
"""
