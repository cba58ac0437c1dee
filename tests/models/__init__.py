"""Published models of other libraries, of small configurations and random weights.

``nox -s models`` trains each with ipufit and in a loop written by hand; see docs/models.md.
"""
