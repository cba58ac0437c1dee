"""``Model`` and its ways: compile, fit, evaluate, predict, and the only training loop.

Nothing here asks which engine runs a program. Users import from ``ipufit`` itself.
"""
