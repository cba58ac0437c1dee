"""Copies of the test process by fork, which spare a test the import of torch."""

import os

import torch

# After a backward pass in this process a copy can't train with a torch that is built for CUDA: it
# has no thread for the gradients of a device. One of torch 2.0 can't let go of a process group.
CAN_COPY = hasattr(os, "fork") and torch.version.cuda is None
