"""Weights of which each process has a part, and whole ones only while they are at work (ZeRO 3).

``graph`` puts into a recorded micro-batch where the processes meet; ``weights`` is what happens
there; ``updater`` and ``programs`` train and evaluate with parts.
"""
