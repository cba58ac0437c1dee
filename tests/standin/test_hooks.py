import pytest

from ipufit.poptorch import _hooks as hooks


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
