"""Errors with their fields, questions about hardware, and what only the SDK can do."""

import pickle

import pytest
import torch

import ipufit.poptorch as poptorch
from ipufit.poptorch import _impl
from ipufit.poptorch._tracing import Trace, traced
from tests.poptorch.option_texts import exactly

core = poptorch.poptorch_core


def test_an_error_of_the_front_end_says_where_it_is_from():
    error = poptorch.createPoptorchError("text")
    assert type(error) is poptorch.Error
    assert str(error) == "'poptorch_py_error': text"
    assert (error.type, error.message, error.location) == ("poptorch_py_error", "text", "")


@pytest.mark.parametrize(
    ("kind", "expected", "name"),
    [
        (core.TestErrorType.Poptorch, poptorch.Error, "poptorch_cpp_error"),
        (core.TestErrorType.Popart, poptorch.Error, "popart_exception"),
        (core.TestErrorType.PopartInternal, poptorch.Error, "popart_internal_exception"),
        (core.TestErrorType.Poplibs, poptorch.Error, "poplibs_exception"),
        (
            core.TestErrorType.PoplarUnrecoverable,
            poptorch.UnrecoverableError,
            "poplar_unrecoverable_runtime_error",
        ),
        (core.TestErrorType.PoplarUnknown, poptorch.Error, "poplar_unknown_runtime_error"),
        (
            core.TestErrorType.PoplarRecoverableFullReset,
            poptorch.RecoverableError,
            "poplar_recoverable_runtime_error",
        ),
        (core.TestErrorType.PoplarLinkError, poptorch.Error, "poplar_link_error"),
    ],
)
def test_errors_of_a_device_can_be_raised_to_try_out_their_handling(kind, expected, name):
    with pytest.raises(poptorch.Error) as raised:
        core._throwTestError(kind)
    error = raised.value
    assert type(error) is expected
    assert error.type == name
    assert error.message.endswith(".")
    assert error.location == "[0] throwTestError::bottomLevel\n[1] throwTestError::topLevel"
    assert str(error) == f"'{name}': {error.message}\nRaised in:\n{error.location}"
    if expected is poptorch.RecoverableError:
        assert error.recovery_action == "FULL_RESET"


def test_there_is_no_hardware():
    assert poptorch.ipuHardwareIsAvailable() is False
    assert poptorch.ipuHardwareIsAvailable(4) is False
    assert core.ipuHardwareVersion() == core.ipuHardwareVersion(numIpus=4) == 0
    with pytest.raises(
        AssertionError,
        match=exactly(
            "No IPU hardware available on this system: ipufit.poptorch computes with torch. Ask "
            "poptorch.ipuHardwareIsAvailable() first, or run the program with `ipufit run "
            "--claim-ipus`, which says that there are some."
        ),
    ):
        poptorch.ipuHardwareVersion()


def test_there_is_hardware_where_it_is_claimed(monkeypatch):
    monkeypatch.setenv("IPUFIT_CLAIM_IPUS", "1")
    assert poptorch.ipuHardwareIsAvailable() is True
    assert poptorch.ipuHardwareIsAvailable(64) is True
    assert poptorch.ipuHardwareIsAvailable(65) is False
    assert poptorch.ipuHardwareVersion() == core.ipuHardwareVersion(4) == 2
    assert core.ipuHardwareVersion(65) == 0


def test_a_recording_is_seen_while_it_lasts():
    def questions():
        return (
            poptorch.isRunningOnIpu(),
            _impl.isDispatchTracing(),
            core.isCompilingWithDispatcher(),
        )

    assert questions() == (False, False, False)
    with traced(Trace(training=True)):
        assert questions() == (True, True, True)
    assert questions() == (False, False, False)


def test_nothing_is_left_to_do_at_the_end():
    assert poptorch.poptorchAtExit() is None
    assert core.poptorchAtExit() is None


ONLY_THE_SDK = (
    "poptorch_core.{} works on programs of a device, which only the SDK makes. Use the methods of "
    "poptorch.PoplarExecutor."
)


@pytest.mark.parametrize(
    "name", [*core._OF_PROGRAMS, "CompilerOptions", "InternalPoplarExecutable"]
)
def test_what_needs_a_device_says_so(name):
    with pytest.raises(poptorch.Error) as refused:
        getattr(core, name)()
    assert refused.value.message == ONLY_THE_SDK.format(name)


def test_files_of_the_sdk_are_not_read():
    with pytest.raises(poptorch.Error) as refused:
        poptorch.importPoptorchMetadataFromFile("x.poptorch")
    assert refused.value.message == (
        "The head of x.poptorch can only be read with the SDK that wrote it. Files of this engine "
        "are opened with poptorch.load(filename)."
    )


@pytest.mark.parametrize(
    ("ref", "other", "close"),
    [
        (torch.ones(2), torch.ones(2) + 1e-9, True),
        (torch.ones(2), torch.ones(2) + 1e-3, False),
        (torch.ones(1), torch.tensor(1.0), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), 1.0, False),
        ([torch.ones(2), (torch.zeros(1),)], [torch.ones(2), (torch.zeros(1),)], True),
        ([torch.ones(2), (torch.zeros(1),)], [torch.ones(2), (torch.ones(1),)], False),
        ([torch.ones(2)], (torch.ones(2),), False),
        ((torch.ones(2),), [torch.ones(2)], False),
        ((torch.ones(2),), (torch.ones(2), torch.ones(2)), False),
    ],
)
def test_structures_are_compared_by_form_and_values(ref, other, close):
    assert poptorch.testing.allclose(ref, other) is close


def test_comparing_something_else_is_refused():
    with pytest.raises(
        AssertionError,
        match=exactly(
            "allclose compares tensors, lists and tuples of them, got dict. Take the tensors out "
            "of it."
        ),
    ):
        poptorch.testing.allclose({"a": torch.ones(1)}, {"a": torch.ones(1)})
    with pytest.raises(RuntimeError):
        poptorch.testing.allclose(torch.ones(1), torch.ones(1, dtype=torch.float64))


def test_a_model_that_poptorch_pickled_while_it_was_wrapped_is_read_as_a_plain_one():
    """Such a file calls a function of PopTorch's by name, with the plain object."""

    class Pickled:
        def __reduce__(self):
            return _impl._restoreWrapperIfNecessary, (torch.nn.Linear(2, 3),)

    found = pickle.loads(pickle.dumps(Pickled()))
    assert type(found) is torch.nn.Linear
    assert found.weight.shape == (3, 2)
