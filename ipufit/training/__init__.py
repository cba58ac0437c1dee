"""``Model`` and its ways: compile, fit, evaluate, predict, and the ``Trainer`` of all of them.

Nothing here asks which engine runs a program. Users import from ``ipufit`` itself.
"""
