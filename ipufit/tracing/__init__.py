"""A function recorded once as a graph of ATen operators, and everything read from such graphs.

Capture, source positions, the state that a recording froze, comparisons of values, and stages that
a forward pass goes through. ``interpreter`` runs graphs and tells listeners of every operator: who
wants to know something of operators writes a listener. Both engines, the stand-in for PopTorch and
all analyses build on it; it knows none of them.
"""
