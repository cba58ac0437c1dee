"""Training in which each process keeps a part of the optimizer's state (ZeRO 1)."""
