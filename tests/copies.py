"""Copies of the test process by fork, which spare a test the import of torch."""

import multiprocessing
import os
import warnings

import torch

# After a backward pass in this process a copy can't train with a torch that is built for CUDA: it
# has no thread for the gradients of a device. One of torch 2.0 can't let go of a process group.
CAN_COPY = hasattr(os, "fork") and torch.version.cuda is None


def start_copy(function, *arguments):
    """Call a function in a copy of this process; the multiprocessing.Process."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    with warnings.catch_warnings():
        # Of the test runner's other threads, which do not matter to the copy.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process
