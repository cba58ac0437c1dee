"""What a model is refused for: batches, gradients, losses, types, arguments, tracing."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from ipufit import poptorch
from ipufit.poptorch import ops, optim
from tests.poptorch.conditions.making import (
    ONE,
    TWO,
    WITH_GRADIENT,
    Fixed,
    Row,
    call,
    changed_state,
    infer,
    later,
    loss,
    next_optimizer,
    opts,
    overwritten,
    same,
    train,
    trained,
)

ROWS = [
    # Batches.
    Row(
        "accumulation in inference",
        lambda: infer(same, change=lambda o: o.Training.gradientAccumulation(2)),
        poptorch.Error,
        "poptorch.Options().Training.gradientAccumulation to 1",
        "run for pipelined execution instead. Got 2.",
    ),
    Row(
        "rows that do not divide",
        lambda: infer(same, torch.ones(3, 2), change=lambda o: o.deviceIterations(2)),
        AssertionError,
        "Invalid batch dimension: in the input x of",
        "which loads the right number.",
    ),
    Row(
        "a number for several batches",
        lambda: infer(same, TWO, torch.tensor(1.0), change=lambda o: o.deviceIterations(2)),
        AssertionError,
        "Invalid batch dimension: in the input *more[0]",
        "which loads the right number.",
    ),
    Row(
        "input grouping All",
        lambda: opts().replicationFactor(4).inputReplicaGrouping(2, poptorch.CommGroupType.All),
        ValueError,
        "CommGroupType.All is no grouping of inputs. For",
        "poptorch.CommGroupType.Consecutive).",
    ),
    Row(
        "input grouping too large",
        lambda: (
            opts().replicationFactor(2).inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive)
        ),
        ValueError,
        "A group of 4 replicas needs as many replicas,",
        "replicationFactor first, with a multiple.",
    ),
    Row(
        "input grouping uneven",
        lambda: (
            opts().replicationFactor(4).inputReplicaGrouping(3, poptorch.CommGroupType.Consecutive)
        ),
        ValueError,
        "The size of a group must divide the 4 replicas,",
        "4 replicas, got 3. Use one of [1, 2, 4].",
    ),
    Row(
        "EveryN beyond the iterations",
        lambda: infer(
            same,
            TWO,
            change=lambda o: o.deviceIterations(2).outputMode(poptorch.OutputMode.EveryN, 4),
        ),
        poptorch.Error,
        "The N of OutputMode.EveryN must divide the",
        "and deviceIterations(2). Use one of [1, 2].",
    ),
    Row(
        "EveryN that does not divide",
        lambda: infer(
            same,
            torch.ones(3, 2),
            change=lambda o: o.deviceIterations(3).outputMode(poptorch.OutputMode.EveryN, 2),
        ),
        poptorch.Error,
        "The N of OutputMode.EveryN must divide the",
        "and deviceIterations(3). Use one of [1, 3].",
    ),
    Row(
        "EveryN without N",
        lambda: opts().outputMode(poptorch.OutputMode.EveryN),
        AssertionError,
        "OutputMode.EveryN needs output_return_period, a",
        "2) for every second device iteration.",
    ),
    # Gradients.
    Row(
        "no reduction",
        lambda: opts().Training.accumulationAndReplicationReductionType(
            poptorch.ReductionType.NoReduction
        ),
        ValueError,
        "accumulationAndReplicationReductionType must be",
        "got <ReductionType.NoReduction: 2>.",
    ),
    Row(
        "an unknown reduction",
        lambda: opts().Training.accumulationAndReplicationReductionType("mean"),
        ValueError,
        "accumulationAndReplicationReductionType must be",
        "or poptorch.ReductionType.Sum, got 'mean'.",
    ),
    Row(
        "PostAndLoss",
        lambda: train(
            loss,
            change=lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(
                poptorch.MeanReductionStrategy.PostAndLoss
            ),
        ),
        poptorch.Error,
        "The option",
        "the device's compiler has no such one.",
    ),
    Row(
        "Running once compiled",
        lambda: next_optimizer(lambda p: optim.SGD(p, lr=0.1, accum_type=torch.float16)),
        ValueError,
        "Invalid optimizer: accum_type=torch.float16",
        "or the type in the first optimizer.",
    ),
    Row(
        "a foreign parameter",
        lambda: trained(make=lambda p: optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)),
        KeyError,
        "the optimizer has a parameter of shape (1,)",
        "the optimizer from model.parameters().",
    ),
    # Losses.
    Row(
        "no loss",
        lambda: train(same),
        poptorch.Error,
        "Couldn't find a loss in graph! Training needs a",
        "poptorch.identity_loss(value, reduction).",
    ),
    Row(
        "two losses",
        lambda: train(
            lambda net, x: (
                nn.functional.mse_loss(x, ONE.to("ipu")),
                x.sum(),
                ops.identity_loss(x, "sum"),
            )
        ),
        poptorch.Error,
        "Multiple independent losses found in graph.",
        '+ loss2, reduction="none").',
    ),
    Row(
        "a reduction of identity_loss",
        lambda: ops.identity_loss(ONE, "average"),
        AssertionError,
        'Unsupported reduction type! Expected "sum",',
        '"sum", "mean" or "none", got \'average\'.',
    ),
    Row(
        "class weights",
        lambda: train(
            lambda net, x: nn.functional.cross_entropy(
                x, torch.zeros(1, dtype=torch.long, device="ipu"), weight=net.state
            )
        ),
        poptorch.Error,
        'Parameter "weight" is unsupported for',
        "and pass the sum to poptorch.identity_loss.",
    ),
    Row(
        "nll class weights",
        lambda: train(
            lambda net, x: nn.functional.nll_loss(
                x.log_softmax(1), torch.zeros(1, dtype=torch.long, device="ipu"), weight=net.state
            )
        ),
        poptorch.Error,
        'Parameter "weight" is unsupported for',
        "and pass the sum to poptorch.identity_loss.",
    ),
    Row(
        "CTC none",
        lambda: train(
            lambda net, x: nn.functional.ctc_loss(
                x.view(2, 1, 1).expand(2, 1, 3).log_softmax(2),
                torch.ones(1, 1, dtype=torch.int, device="ipu"),
                torch.full((1,), 2, dtype=torch.int, device="ipu"),
                torch.ones(1, dtype=torch.int, device="ipu"),
                reduction="none",
            )
        ),
        poptorch.Error,
        'CTCLoss with reduction="none" is currently not',
        'not supported. Use "mean" or "sum".',
    ),
    Row(
        "CTC concatenated",
        lambda: train(
            lambda net, x: nn.functional.ctc_loss(
                x.view(2, 1, 1).expand(2, 1, 3).log_softmax(2),
                torch.ones(1, dtype=torch.int, device="ipu"),
                torch.full((1,), 2, dtype=torch.int, device="ipu"),
                torch.ones(1, dtype=torch.int, device="ipu"),
            )
        ),
        poptorch.Error,
        "CTCLoss with concatenated targets is not",
        "length), got (1,). Pad them to one length.",
    ),
    Row(
        "one_hot without classes",
        lambda: infer(
            lambda net, x, y: nn.functional.one_hot(y), ONE, torch.zeros(1, dtype=torch.long)
        ),
        poptorch.Error,
        "OneHot num classes must be specified and must",
        "out from the values: give num_classes.",
    ),
    Row(
        "backward of an output",
        lambda: infer(same).backward(),
        poptorch.Error,
        "backward() cannot be called explicitly on",
        "you should use a trainingModel instead.",
    ),
    # Types.
    Row(
        "an input of complex numbers",
        lambda: infer(same, ONE, torch.ones(1, dtype=torch.complex64)),
        poptorch.Error,
        "Unsupported input type torch.complex64 of the",
        "tensor fits as torch.view_as_real(tensor).",
    ),
    Row(
        "a tensor without elements",
        lambda: infer(same, ONE, torch.ones(0)),
        poptorch.Error,
        "Zero-sized tensors are unsupported (Got shape",
        "input *more[0] out of this call, or pad it.",
    ),
    Row(
        "an empty tensor inside",
        lambda: infer(lambda net, x: x[:0]),
        poptorch.Error,
        "Zero-sized tensors are unsupported (Got shape",
        "out what is computed from it, or pad it.",
    ),
    Row(
        "a shape that depends on values",
        lambda: infer(lambda net, x: x[x > 0]),
        DynamicOutputShapeException,
        "a shape depends on a tensor's values, but the",
        "a fixed k instead of nonzero or unique.",
    ),
    # Arguments.
    Row(
        "too many",
        lambda: poptorch.inferenceModel(Fixed())(ONE, 1, 2),
        AssertionError,
        "Too many arguments provided: expected x, times",
        "got 3 by position. Pass what forward takes.",
    ),
    Row(
        "an unknown keyword",
        lambda: poptorch.inferenceModel(Fixed())(ONE, time=1),
        AssertionError,
        "time is not a valid parameter. Allowed values",
        "parameter. Allowed values are x, times.",
    ),
    Row(
        "the same twice",
        lambda: poptorch.inferenceModel(Fixed())(ONE, x=ONE),
        AssertionError,
        "Parameter x was passed more than once. Pass it",
        "than once. Pass it by position or by name.",
    ),
    Row(
        "one is missing",
        lambda: poptorch.inferenceModel(Fixed())(times=ONE),
        poptorch.Error,
        "Mandatory parameter x missing. Pass a value for",
        "parameter x missing. Pass a value for it.",
    ),
    Row(
        "another number",
        lambda: later(call(ONE, 1), call(ONE, 2)),
        poptorch.Error,
        "Value mismatch for *more[0]: expected 1 but got",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "another text",
        lambda: later(call(ONE, mode="a"), call(ONE, mode="b")),
        poptorch.Error,
        "Value mismatch for mode: expected a but got b.",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "another count",
        lambda: later(call(ONE, ONE), call(ONE)),
        poptorch.Error,
        "Number of positional arguments mismatch:",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "another type",
        lambda: later(call(ONE, (ONE,)), call(ONE, [ONE])),
        poptorch.Error,
        "Type mismatch for *more[0]: expected tuple but",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "another length",
        lambda: later(call(ONE, (ONE,)), call(ONE, (ONE, ONE))),
        poptorch.Error,
        "Length mismatch for *more[0]: expected 1",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "a key less",
        lambda: later(call(ONE, a=ONE, b=ONE), call(ONE, a=ONE)),
        poptorch.Error,
        "Keys mismatch for named arguments: Missing",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "a key more",
        lambda: later(call(ONE, a=ONE), call(ONE, a=ONE, b=ONE)),
        poptorch.Error,
        "Keys mismatch for named arguments: Unexpected",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "a key less inside",
        lambda: later(call(ONE, {"a": ONE, "b": ONE}), call(ONE, {"a": ONE})),
        poptorch.Error,
        "Keys mismatch for *more[0]: Missing arguments:",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "another dtype",
        lambda: later(call(ONE), call(ONE.half())),
        poptorch.Error,
        "Data type mismatch for x: expected",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "another shape",
        lambda: later(call(ONE), call(TWO)),
        poptorch.Error,
        "Shape mismatch for x: expected torch.Size([1,",
        "a new inferenceModel() or trainingModel().",
    ),
    Row(
        "a host tensor with gradient moved",
        lambda: infer(lambda net, x: x + WITH_GRADIENT.to("ipu")),
        poptorch.Error,
        "An input tensor to an IPU model can not have",
        "or make it a parameter of the module.",
    ),
    # Tracing.
    Row(
        "a value read",
        lambda: infer(lambda net, x: x * x.sum().item()),
        poptorch.Error,
        "aten::item is only supported in eager mode: a",
        "training and store it as an attribute.",
    ),
    Row(
        "a branch on a value",
        lambda: infer(lambda net, x: x if x.sum() > 0 else -x),
        poptorch.Error,
        "aten::item is only supported in eager mode:",
        "so that both branches are in the program.",
    ),
    Row(
        "a tensor of the host",
        lambda: infer(lambda net, x: x + torch.FloatTensor([1.0, 2.0])),
        poptorch.Error,
        "Expected an IPU tensor but got",
        "of the module, or pass it as an input; reach a parameter through the module.",
    ),
    Row(
        "a hook that can not be called (before)",
        lambda: poptorch.registerPreCompileHook(3),
        RuntimeError,
        "Pre-compile hook must be callable, got 3. Pass",
        "got 3. Pass a function without arguments.",
    ),
    Row(
        "a hook that can not be called (after)",
        lambda: poptorch.registerPostCompileHook(3),
        RuntimeError,
        "Post-compile hook must be callable, got 3. Pass",
        "got 3. Pass a function without arguments.",
    ),
    Row(
        "a removed buffer",
        lambda: infer(overwritten("remove")),
        poptorch.Error,
        "Buffer state is removed from the model when",
        "Keep it, and change its values in place.",
    ),
    Row(
        "a reassigned buffer",
        lambda: infer(overwritten("reassign")),
        poptorch.Error,
        "Buffer state is reassigned within the model",
        "where src is the name of the source tensor.",
    ),
    Row(
        "a buffer changed on replicas",
        lambda: infer(changed_state, TWO, change=lambda o: o.replicationFactor(2)),
        poptorch.Error,
        "PopTorch does not support broadcasting buffers.",
        "'state' is changed in place on 2 replicas.",
    ),
]
