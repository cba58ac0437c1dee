"""Executions captured as CUDA graphs: when they are, how, and where their inputs lie."""
