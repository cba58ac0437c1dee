"""Helpers that know nothing of training: trees, random numbers, files, errors, interrupts, timers.

They import each other, ``ipufit.errors`` and nothing else of ipufit.
"""
