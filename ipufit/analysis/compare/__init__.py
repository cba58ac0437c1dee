"""Comparisons of numbers: a program with its module, one division of an update with another."""
