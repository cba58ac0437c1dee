"""Conformance cases: what PopTorch's terms mean in numbers, for any implementation of them.

``python -m ipufit.conformance`` runs them and prints a table. Each case computes what is expected
with a few lines of plain torch in float64, which share nothing with the engines.
"""
