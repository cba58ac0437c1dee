"""A function recorded once as a graph of ATen operators, and everything read from such graphs.

Capture, source positions, the state that a recording froze, and comparisons of values. Both
engines, the stand-in for PopTorch and all analyses build on it; it knows none of them.
"""
