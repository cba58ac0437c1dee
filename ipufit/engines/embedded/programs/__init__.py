"""Programs of the embedded engine: training and inference, with state whole or sharded.

``training`` and ``inference`` share ``base``; ``zero`` and ``fsdp`` shard them over processes;
``execution`` runs the updates of one call, and ``cuda_graph`` replays it where that is captured.
"""
