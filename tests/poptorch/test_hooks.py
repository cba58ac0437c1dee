import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch import _compiled as hooks


@pytest.fixture
def calls():
    """What is registered here is taken back."""
    handles, made = [], []

    def add(register, name):
        handles.append(register(lambda: made.append(name)))
        return handles[-1]

    made_add = add
    made_add.made = made
    yield made_add
    for handle in handles:
        handle.remove()


def test_hooks_run_around_a_compilation_in_order_of_registration(calls):
    for name in ("b", "a"):
        calls(hooks.registerPostCompileHook, f"after {name}")
        calls(hooks.registerPreCompileHook, f"before {name}")
    with hooks.compile_hooks():
        calls.made.append("compiling")
    assert calls.made == ["before b", "before a", "compiling", "after b", "after a"]


def test_post_hooks_run_also_after_a_failure(calls):
    calls(hooks.registerPostCompileHook, "after")
    with pytest.raises(ZeroDivisionError), hooks.compile_hooks():
        raise ZeroDivisionError
    assert calls.made == ["after"]


def test_a_removed_hook_is_not_called(calls):
    calls(hooks.registerPreCompileHook, "gone").remove()
    calls(hooks.registerPreCompileHook, "there")
    with hooks.compile_hooks():
        pass
    assert calls.made == ["there"]


def test_a_hook_may_remove_itself(calls):
    handle = hooks.registerPreCompileHook(lambda: handle.remove())
    calls(hooks.registerPreCompileHook, "there")
    for _ in range(2):
        with hooks.compile_hooks():
            pass
    assert calls.made == ["there", "there"]


@pytest.mark.parametrize(
    ("register", "which"),
    [(hooks.registerPreCompileHook, "Pre"), (hooks.registerPostCompileHook, "Post")],
)
def test_what_can_not_be_called_is_refused(register, which):
    with pytest.raises(RuntimeError) as caught:
        register(2)
    assert str(caught.value) == (
        f"{which}-compile hook must be callable, got 2. Pass a function without arguments."
    )


class Doubled:
    """PopTorch Geometric replaces operators whose shapes depend on values in this way."""

    def replace(self):
        self.original = nn.functional.relu
        nn.functional.relu = lambda x: 2 * x

    def restore(self):
        nn.functional.relu = self.original


class Failing(Doubled):
    def replace(self):
        raise ZeroDivisionError


@pytest.fixture
def substitutions(monkeypatch):
    """What is registered here is taken back."""
    registered = []
    monkeypatch.setattr(hooks._OverwriteContextManager, "_subsitution_manager_types", registered)
    return registered


def test_a_substitution_is_there_while_a_model_is_recorded_and_only_then(substitutions):
    class Net(nn.Module):
        def forward(self, x):
            return nn.functional.relu(x)

    relu = nn.functional.relu
    for _ in range(2):
        hooks._OverwriteContextManager.registerSubsitutionManager(Doubled)
    assert substitutions == [Doubled]
    x = torch.tensor([-1.0, 3.0])
    model = poptorch.inferenceModel(Net())
    for _ in range(2):
        assert model(x).tolist() == [-2, 6]
    assert nn.functional.relu is relu
    assert Net()(x).tolist() == [0, 3]


def test_a_substitution_that_fails_leaves_nothing_replaced(substitutions):
    relu = nn.functional.relu
    substitutions += [Doubled, Failing]
    with pytest.raises(ZeroDivisionError):
        poptorch.inferenceModel(nn.ReLU())(torch.ones(1))
    assert nn.functional.relu is relu
