"""What is refused of operators, anchors, files, counters and logs."""

import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch import ops
from tests.poptorch.conditions.making import (
    ONE,
    Row,
    empty_multiconv,
    infer,
    loaded,
    nested_multiconv,
    same,
    train,
    trained,
)

ROWS = [
    # Operators.
    Row(
        "nop",
        lambda: infer(lambda net, x: ops.nop(3)),
        poptorch.Error,
        "nop must take a torch.tensor argument. <class",
        "supported. Call it once for each tensor.",
    ),
    Row(
        "recomputationCheckpoint",
        lambda: ops.recomputationCheckpoint(3),
        ValueError,
        "All inputs must be tensors, or one list or",
        "got int. Leave out what is not a tensor.",
    ),
    Row(
        "set_available_memory",
        lambda: infer(lambda net, x: ops.set_available_memory(x, 2.0)),
        poptorch.Error,
        "set_available_memory expects a proportion from",
        "to 1, got 2.0. Divide a percentage by 100.",
    ),
    Row(
        "for_loop inputs",
        lambda: ops.for_loop(2, lambda x: [x], ONE),
        ValueError,
        "poptorch.for_loop expects input tensors",
        "list) Got Tensor: write [x] for one tensor.",
    ),
    Row(
        "for_loop count",
        lambda: infer(lambda net, x: ops.for_loop(x, lambda x: [x], [x])),
        poptorch.Error,
        "poptorch.for_loop expects count to be an int of",
        "Pass a Python int.",
    ),
    Row(
        "for_loop in training",
        lambda: train(
            lambda net, x: ops.identity_loss(ops.for_loop(2, lambda x: [x], [x])[0], "sum")
        ),
        poptorch.Error,
        "poptorch.for_loop() is only supported in",
        "or write the steps one after another.",
    ),
    Row(
        "cond inputs",
        lambda: ops.cond(torch.tensor(True), lambda x: [x], ONE, lambda x: [x], ONE),
        ValueError,
        "poptorch.cond expects then_inps and else_inps",
        "write [x] for one tensor, [] for none.",
    ),
    Row(
        "cond outputs",
        lambda: infer(
            lambda net, x: ops.cond(x.sum() > 0, lambda x: [x, x], [x], lambda x: [x], [x])
        ),
        poptorch.Error,
        "then_body and else_body of poptorch.cond must",
        "where one of them has nothing to compute.",
    ),
    Row(
        "cond in training",
        lambda: train(
            lambda net, x: ops.identity_loss(
                ops.cond(x.sum() > 0, lambda x: [x], [x], lambda x: [x], [x])[0], "sum"
            )
        ),
        poptorch.Error,
        "poptorch.cond() is only supported in inference,",
        "or write the steps one after another.",
    ),
    Row(
        "a slice that does not divide",
        lambda: infer(
            lambda net, x, i: ops.dynamic_slice(x, 1, i, 3, 1),
            torch.ones(1, 2).repeat(1, 1),
            torch.tensor([0]),
        ),
        poptorch.Error,
        "The size of the slice (3) must be a factor of",
        "Choose another size, or pad the tensor.",
    ),
    Row(
        "a slice of no elements",
        lambda: infer(lambda net, x, i: ops.dynamic_slice(x, 1, i, 0, 1), ONE, torch.tensor([0])),
        poptorch.Error,
        "The start and end of a slice must be different.",
        "Got a slice of size 0; make it at least 1.",
    ),
    Row(
        "a slice of fewer",
        lambda: infer(lambda net, x, i: ops.dynamic_slice(x, 1, i, -1, 1), ONE, torch.tensor([0])),
        poptorch.Error,
        "Taking a slice of a tensor with the end less",
        "Got a slice of size -1; make it at least 1.",
    ),
    Row(
        "a slice without step",
        lambda: infer(lambda net, x, i: ops.dynamic_slice(x, 1, i, 1, 0), ONE, torch.tensor([0])),
        poptorch.Error,
        "Slicing step must be at least 1, got 0. Reverse",
        "1, got 0. Reverse a slice with torch.flip.",
    ),
    Row(
        "an update of another rank",
        lambda: infer(
            lambda net, x, i: ops.dynamic_update(x, x[0], 1, i, 1), ONE, torch.tensor([0])
        ),
        poptorch.Error,
        "input and src tensors must have same",
        "dimensionality. (2) vs (1) Reshape src.",
    ),
    Row(
        "an update of another dtype",
        lambda: infer(
            lambda net, x, i: ops.dynamic_update(x, x.long(), 1, i, 2), ONE, torch.tensor([0])
        ),
        poptorch.Error,
        "input and src tensor must have same dtype.",
        "Convert src with src.to(input.dtype).",
    ),
    Row(
        "custom_op mixed",
        lambda: ops.custom_op([ONE], "a", "b", 1, [ONE], {"x": [1, "a"]}),
        ValueError,
        "The types in a list/tuple attribute must all be",
        "all be the same. Got int and str for 'x'.",
    ),
    Row(
        "custom_op type",
        lambda: ops.custom_op([ONE], "a", "b", 1, [ONE], {"x": None}),
        ValueError,
        "Attribute values must be floats, ints, strings",
        "ints of strings. Got NoneType for 'x'.",
    ),
    Row(
        "custom_op large",
        lambda: infer(lambda net, x: ops.custom_op([x], "a", "b", 1, [x], {"x": 1e60})),
        poptorch.Error,
        "1e+60 is too high for a Popart float attribute.",
        "into float32, whose largest is 3.40282e+38.",
    ),
    Row(
        "custom_op",
        lambda: infer(lambda net, x: ops.custom_op([x], "a", "b", 1, [x])),
        poptorch.Error,
        "poptorch.custom_op: 'a' of 'b', version 1, is",
        "which returns tensors like example_outputs.",
    ),
    Row(
        "CPU in training",
        lambda: train(lambda net, x: ops.identity_loss(ops.CPU(torch.sin, "s")(x), "sum")),
        poptorch.Error,
        "poptorch.CPU 's': CPU ops are only supported in",
        "Compute it before the model, on its inputs.",
    ),
    Row(
        "MultiConv partials",
        lambda: ops.MultiConv().partialsTypes(torch.int32),
        ValueError,
        "Invalid partials types. Expecting torch.float",
        "torch.float or torch.half, got torch.int32.",
    ),
    Row(
        "MultiConv nested",
        lambda: infer(nested_multiconv),
        poptorch.Error,
        "Nested poptorch.MultiConv is not supported.",
        "one first, or put all convolutions into it.",
    ),
    Row(
        "MultiConv empty",
        lambda: infer(empty_multiconv),
        poptorch.Error,
        "Unexpected end_multi_conv: there is no",
        "Put at least one into it, or remove it.",
    ),
    Row(
        "NameScope",
        lambda: ops.NameScope(3),
        AssertionError,
        "Parameter to NameScope must be a string, got 3.",
        "to NameScope must be a string, got 3.",
    ),
    Row(
        "linear upsampling",
        lambda: infer(
            lambda net, x: nn.functional.interpolate(
                x.view(1, 1, 2), scale_factor=2.0, mode="linear"
            )
        ),
        poptorch.Error,
        "Unsupported upsample mode",
        "or bilinear on a 4-dimensional input.",
    ),
    Row(
        "trilinear upsampling",
        lambda: infer(
            lambda net, x: nn.functional.interpolate(
                x.view(1, 1, 1, 1, 2), scale_factor=2.0, mode="trilinear"
            )
        ),
        poptorch.Error,
        "Unsupported upsample mode",
        "or bilinear on a 4-dimensional input.",
    ),
    Row(
        "bincount",
        lambda: infer(lambda net, x, i: torch.bincount(i), ONE, torch.tensor([1, 2])),
        poptorch.Error,
        "Bincount `minlength` must be specified and must",
        "0: give one more than the largest value.",
    ),
    # Anchors, files.
    Row(
        "names before compiling",
        lambda: trained(run=False)[0].getTensorNames(),
        AssertionError,
        "Model must be compiled before calling",
        "it with inputs, or call compile(), first.",
    ),
    Row(
        "an unknown anchor",
        lambda: trained()[0].getAnchoredTensor("a"),
        AssertionError,
        "No tensor with name a found. Anchored, and run:",
        "long_name).",
    ),
    Row(
        "an anchor of no tensor",
        lambda: infer(same, change=lambda o: o.anchorTensor("a", "b")),
        poptorch.Error,
        "no tensor of the program is called 'b'. This",
        "have torch's names, not PopART's.",
    ),
    Row(
        "a file of another version",
        lambda: loaded(version="0.0"),
        poptorch.Error,
        "Invalid file",
        "of PopTorch itself can't be read here.",
    ),
    Row(
        "a file without model",
        loaded,
        AssertionError,
        "was created with 'export_model=False'",
        "Wrap the module with poptorch.inferenceModel",
    ),
    Row(
        "cycles not asked for",
        lambda: trained()[0].cycleCount(),
        poptorch.Error,
        "Cycle count logging is disabled. Please set",
        "set option logCycleCount to True to enable.",
    ),
    Row(
        "cycles before a run",
        lambda: trained(lambda o: o.logCycleCount(True), run=False)[0].cycleCount(),
        poptorch.Error,
        "Please run the model at least once before",
        "at least once before obtaining cycle count.",
    ),
    Row(
        "cycles",
        lambda: trained(lambda o: o.logCycleCount(True))[0].cycleCount(),
        poptorch.Error,
        "Cycle count logging is only supported on actual",
        "Leave out options.logCycleCount(True).",
    ),
    Row(
        "compilationTime before",
        lambda: trained(run=False)[0].compilationTime(),
        poptorch.Error,
        "Please compile the model before obtaining",
        "model before obtaining compilation time.",
    ),
    Row(
        "compilationTime without bar",
        lambda: trained(lambda o: o.showCompilationProgressBar(False))[0].compilationTime(),
        poptorch.Error,
        "Please set showCompilationProgressBar option to",
        "option to obtain compilation time.",
    ),
    Row(
        "rng_state before",
        lambda: trained(run=False)[0].rng_state,
        poptorch.Error,
        "Model has not been compiled or has been",
        "it with inputs, or call compile(), first.",
    ),
    Row(
        "PopART IR",
        lambda: trained()[0]._debugGetPopartIR(),
        poptorch.Error,
        "There is no PopART IR: this model runs in plain",
        "in plain torch. Only the SDK compiles one.",
    ),
    Row(
        "log number",
        lambda: poptorch.setLogLevel(5),
        ValueError,
        "Invalid log level integer 5. Use 0 (TRACE), 1",
        "2 (INFO), 3 (WARN), 4 (ERR) or 6 (OFF).",
    ),
    Row(
        "log name",
        lambda: poptorch.setLogLevel("LOUD"),
        ValueError,
        "Unknown log level: LOUD. Valid values are",
        "are DEBUG, ERR, INFO, OFF, TRACE and WARN",
    ),
    Row(
        "hardware version",
        lambda: poptorch.ipuHardwareVersion(),
        AssertionError,
        "No IPU hardware available on this system:",
        "--claim-ipus`, which says that there are some.",
    ),
]
