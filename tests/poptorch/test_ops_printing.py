"""poptorch.ipu_print_tensor: when, and what, to the letter."""

import pytest
import torch

from ipufit import poptorch
from ipufit.poptorch._operators.printing import Style, text_of
from tests.poptorch.recording import record

PLAIN = Style(1000, 3, 75, 8, "auto", " ", "[", "]")


def shown(values, **changes):
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    return text_of(tensor, "t", PLAIN._replace(**changes))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5, 7, 9], "t: [5 7 9]"),
        ([6, 9, 12], "t: [ 6  9 12]"),
        ([-1, 10], "t: [-1 10]"),
        ([True, False], "t: [1 0]"),
        (3, "t: 3"),
        (2.5, "t: 2.5000000"),
        ([1.0, 2.0], "t: [1.0000000 2.0000000]"),
        ([1.0, -20.5], "t: [  1.000000 -20.500000]"),
        ([float("nan"), float("inf"), 1.0], "t: [      nan       inf 1.0000000]"),
        ([0.0, 0.0], "t: [0.0000000 0.0000000]"),
        ([1e9, 1.0], "t: [1.0000000e+09 1.0000000e+00]"),
        ([1e-5, 1.0], "t: [9.9999997e-06 1.0000000e+00]"),
        ([[1, 2], [3, 4]], "t: [\n [1 2]\n [3 4]\n]"),
        ([[[1], [20]]], "t: [\n [\n  [ 1]\n  [20]\n ]\n]"),
    ],
)
def test_elements_have_one_width_and_one_format(values, expected):
    assert shown(values) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"digits": 4}, "t: [ 1.00 12.35]"),
        ({"digits": 0}, "t: [1 12.3457]"),
        ({"float_format": "fixed", "digits": 3}, "t: [ 1.0 12.3]"),
        ({"float_format": "scientific", "digits": 3}, "t: [1.00e+00 1.23e+01]"),
        ({"float_format": "none", "digits": 4}, "t: [    1 12.35]"),
        ({"separator": ";", "digits": 2}, "t: [ 1;12]"),
        ({"open_bracket": "{", "close_bracket": ">", "digits": 2}, "t: { 1 12>"),
    ],
)
def test_every_option_of_the_format_shows(changes, expected):
    assert shown([1.0, 12.3456789], **changes) == expected


def test_a_fixed_format_stays_fixed_for_small_numbers():
    assert shown([1e-6, 1.0], float_format="fixed") == "t: [0.0000010 1.0000000]"


def test_more_elements_than_the_threshold_are_summarised():
    values = torch.arange(12)
    assert shown(values, summarise_threshold=11, edge_items=2) == "t: [ 0  1 ... 10 11]"
    assert shown(values, summarise_threshold=12) == "t: [ 0  1  2  3  4  5  6  7  8  9 10 11]"
    assert shown(values, summarise_threshold=0) == "t: [ 0  1  2  3  4  5  6  7  8  9 10 11]"
    rows = torch.arange(16).reshape(4, 4)
    assert shown(rows, summarise_threshold=1, edge_items=1) == (
        "t: [\n [ 0 ...  3]\n ...\n [12 ... 15]\n]"
    )


def test_long_lines_are_split():
    assert shown(torch.arange(5), max_line_width=6) == "t: [0 1 \n  2 3 \n  4]"
    assert shown(torch.arange(5), max_line_width=0) == "t: [0 1 2 3 4]"
    # One element on each line at least, however long it is.
    narrow = shown([[1.5, 2.5]], max_line_width=1, separator=",", digits=2)
    assert narrow == "t: [\n [1.5,\n   2.5]\n]"


def test_a_recorded_model_prints_at_every_run_and_not_while_it_is_recorded(capfd):
    def model(x):
        return poptorch.ipu_print_tensor(x + 1, "sum") * 2

    recorded = record(model, torch.zeros(2))
    assert capfd.readouterr() == ("", "")
    for value in (1.0, 2.0):
        (out,) = recorded(torch.tensor([value, 0.5]))
        assert out.tolist() == [2 * value + 2, 3.0]
        text = f"sum: ({value + 1:.3f},1.500)\n"
        assert capfd.readouterr() == ("", text)


def test_outside_of_a_model_nothing_is_printed(capfd):
    x = torch.ones(2)
    assert poptorch.ipu_print_tensor(x, "x") is x
    assert capfd.readouterr() == ("", "")


def training(print_gradient, title):
    def step(x, w):
        w = w.detach().requires_grad_()
        loss = (poptorch.ipu_print_tensor(w * x, title, print_gradient) ** 2).sum()
        return torch.autograd.grad(loss, [w])

    return step


@pytest.mark.parametrize("print_gradient", [True, False])
@pytest.mark.parametrize("title", ["wx", ""])
def test_gradients_are_printed_too(print_gradient, title, capfd):
    x, w = torch.tensor([2.0, 3.0]), torch.tensor([0.5, -1.0])
    recorded = record(training(print_gradient, title), x, w, training=True)
    (gradient,) = recorded(x, w)
    assert torch.equal(gradient, 2 * w * x * x)
    forward = f"{title or 'Tensor:0'}: ( 1.000,-3.000)\n"
    name = f"{title}_gradient" if title else "Gradient___Tensor:0"
    backward = f"{name}: ( 2.000,-6.000)\n" if print_gradient else ""
    assert capfd.readouterr().err == forward + backward


def test_prints_without_a_title_are_numbered(capfd):
    def model(x):
        return poptorch.ipu_print_tensor(x) + poptorch.ipu_print_tensor(x + 1)

    for _ in range(2):
        record(model, torch.zeros(1))(torch.zeros(1))
        assert capfd.readouterr().err == "Tensor:0: (0.000)\nTensor:1: (1.000)\n"


def test_all_options_reach_the_text(capfd):
    def model(x):
        return poptorch.ipu_print_tensor(x, "t", True, 5, 1, 9, 2, "scientific", "; ", "<", ">>")

    record(model, torch.zeros(2, 3))(torch.arange(6.0).reshape(2, 3))
    # Of a separator and of brackets the device takes the first character.
    assert capfd.readouterr().err == (
        "t: <\n <0.0e+00;\n   ...;\n   2.0e+00>\n <3.0e+00;\n   ...;\n   5.0e+00>\n>\n"
    )


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            (3,),
            "ipu print tensor must take a torch.tensor argument. <class 'int'> is not supported. "
            "Print Python values with print().",
        ),
        (
            (torch.ones(1), "", True, 1, 1, 1, 1, "hex"),
            "ipu print tensor expects float_format to be one of auto, fixed, scientific, none, "
            "got 'hex'. Leave it out for auto.",
        ),
    ],
)
def test_what_can_not_be_printed_is_refused(args, text):
    with pytest.raises(poptorch.Error) as failure:
        poptorch.ipu_print_tensor(*args)
    assert failure.value.message == text
