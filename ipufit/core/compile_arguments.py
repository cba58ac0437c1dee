"""Arguments of ``compile`` that several rooms read: values of ``jit``, options of programs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, TypeVar

import torch
from torch import Tensor, fx, nn

from ipufit.core import LOWERINGS
from ipufit.core.batch import Mode
from ipufit.errors import CaptureError, ConfigurationError, DataError, UnknownNameError, brief_error
from ipufit.processes import Processes
from ipufit.utils.console import warn_user

T = TypeVar("T")

AUTO, OFF, GRAPH, KERNELS = "auto", "off", "graph", "kernels"
INDUCTOR, CUDAGRAPH = "inductor", "cudagraph"

# A backend of torch.compile: takes a graph and tensors like its inputs, and returns what runs it.
CompilerFunction = Callable[[fx.GraphModule, List[Tensor]], Callable[..., Sequence[Tensor]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """A backend of torch.compile, to which recorded graphs are handed.

    Attributes:
        name: under which torch lists it, or module and name of the function.
        function: the backend.
    """

    name: str
    function: CompilerFunction


def resolve_jit(jit: object, run_eagerly: object) -> Tuple[str, Optional[Backend]]:
    """The way that both arguments of ``compile`` ask for.

    Returns:
        The name of a way, and the backend of torch.compile that has this name; None for a way of
        ipufit's own.

    Raises:
        ConfigurationError: there is no such way, or they say two things.
    """
    if jit == OFF:
        raise ConfigurationError(
            f"jit says how a recorded program runs, got {jit!r}. Pass run_eagerly=True to run "
            "the module itself."
        )
    if not isinstance(jit, str) and not callable(jit):
        raise ConfigurationError(
            f"jit must be {' or '.join(map(repr, LOWERINGS))}, or a backend of torch.compile, by "
            f"name or as a function, got {jit!r}."
        )
    name = jit if isinstance(jit, str) else _name_of(jit)
    if run_eagerly is not True:
        if name in LOWERINGS:
            return name, None
        return name, Backend(name, _backend_of_torch(jit) if isinstance(jit, str) else jit)
    if name != AUTO:
        raise ConfigurationError(
            f"run_eagerly=True runs the module itself, but jit={name!r} asks for a recorded "
            "program. Leave one of them out."
        )
    return OFF, None


def _name_of(function: Callable[..., object]) -> str:
    """Module and name of a function, or of the class of an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


# Backends that torch has for its own tests.
_OF_TESTS = "_TESTING_ONLY"


def _backend_of_torch(name: str) -> CompilerFunction:
    """Look a name up among the backends that torch, and packages installed beside it, bring along.

    Raises:
        ConfigurationError: there is none, or what brings it along can't be loaded.
    """
    try:
        registry = importlib.import_module("torch._dynamo.backends.registry")
        names = [each for each in registry.list_backends(()) if not each.endswith(_OF_TESTS)]
    except Exception as error:
        raise ConfigurationError(
            f"jit={name!r} is none of {', '.join(map(repr, LOWERINGS))}, so it must name a backend "
            f"of torch.compile, but torch {torch.__version__} can't list its backends here: "
            f"{brief_error(error)}. Use one of the names above, or pass the backend as a function."
        ) from error
    try:
        function: CompilerFunction = registry.lookup_backend(name)
        _load(function)
    except Exception as error:
        # Older versions of torch list what other packages bring along only once it is in use.
        if name in names or isinstance(error, ImportError):
            raise ConfigurationError(
                f"jit={name!r} names a backend of torch.compile that can't be loaded: "
                f"{brief_error(error)}. Install what it needs, or use jit='auto'."
            ) from error
        raise UnknownNameError(
            "way to run a recorded program", name, {*LOWERINGS, *names}
        ) from None
    return function


def _load(function: CompilerFunction) -> None:
    """Have a backend import what it needs, which some do with their first graph alone.

    Raises:
        ImportError: it is not installed.
    """
    graph, x = fx.Graph(), torch.ones(1)
    graph.output((graph.call_function(torch.add, (graph.placeholder("x"), 1)),))
    try:
        function(fx.GraphModule({}, graph), [x])
    except ImportError:
        raise
    except Exception:
        # Whether it can compile the program shows with the program.
        return


@dataclasses.dataclass
class EagerFallback:
    """Purposes and forms of micro-batch that run eagerly, as no program can be recorded of them.

    A purpose runs so as a whole where its first micro-batch can't be recorded. Where that can, each
    later form of micro-batch is recorded or run eagerly by itself: which it is depends on the
    module and the form, and on nothing that came before, so that a run that goes on from a
    checkpoint computes alike.

    Attributes:
        reasons: by purpose and form, which is None for all of a purpose, its shapes in words and
            why it can't be recorded.
        recorded: purposes for which something was recorded.
        unreached: names of trained parameters that no gradient reaches in what is recorded.
        chooser: who runs it eagerly, in the user's words.
        advice: the end of the warning: what says that this is meant, and what makes it an error.
    """

    reasons: Dict[Tuple[Mode, object], Tuple[str, str]] = dataclasses.field(default_factory=dict)
    recorded: Set[Mode] = dataclasses.field(default_factory=set)
    unreached: Sequence[str] = ()
    chooser: str = "jit='auto'"
    advice: str = (
        "To silence this warning, use compile(..., run_eagerly=True); jit='graph' makes it an "
        "error."
    )

    def is_whole(self, mode: Mode) -> bool:
        """Tell whether all of a purpose runs eagerly."""
        return (mode, None) in self.reasons

    def mixes(self, mode: Mode) -> bool:
        """Tell whether a form that can't be recorded runs by itself, among others that are."""
        return mode in self.recorded and not self.is_whole(mode)

    def prepared(
        self,
        mode: Mode,
        module: nn.Module,
        may_help: Callable[[Exception], bool],
        prepare: Callable[[], T],
    ) -> T:
        """Prepare a program, and once more as the module itself where it can't be recorded.

        Args:
            mode: purpose of the program.
            module: the user's module.
            may_help: tells by the error of a recording whether the module itself may run.
            prepare: builds and prepares it; lets go of it where that fails.
        """
        try:
            return prepare()
        except Exception as error:
            # A form of micro-batch after the first one has been tried by itself.
            if mode in self.recorded or self.is_whole(mode) or not may_help(_of_recording(error)):
                raise
            with self.trying(error, mode, module):
                return prepare()

    @contextlib.contextmanager
    def trying(
        self, error: Exception, mode: Mode, module: nn.Module, form: object = None, shapes: str = ""
    ) -> Iterator[None]:
        """Prepare the module itself in the block, which shows whether the recording was at fault.

        Args:
            error: that ended the recording.
            mode: purpose of the program.
            module: the user's module.
            form: of the micro-batches that can't be recorded; None for all of the purpose.
            shapes: of the form, in words.

        Raises:
            Exception: the module can't take the micro-batch either.

        Warns:
            UserWarning: it can; once for all purposes and forms.
        """
        is_first = not self.reasons
        error = _of_recording(error)
        is_ours = isinstance(error, CaptureError)
        reason = error.brief if isinstance(error, CaptureError) else f"torch: {brief_error(error)}"
        self.reasons[mode, form] = shapes, reason
        try:
            yield
        except Exception:
            del self.reasons[mode, form]
            if is_ours:
                raise
            raise error from None
        if is_first:
            which = "" if form is None else f" for batches of {shapes}"
            every = "every micro-batch" if form is None else "each of these micro-batches"
            warn_user(
                f"{type(module).__name__} can't be recorded as one program{which}, so "
                f"{self.chooser} runs the module itself{' for them' if which else ''}: {reason} "
                f"The numbers are the same, but it is slower: Python runs for {every}, and no "
                f"operators are fused or compiled. {self.advice}"
            )

    def follow(self, mode: Mode, processes: Processes) -> bool:
        """Take over what another process can't record; return whether this one could."""
        others = processes.gather(self.is_whole(mode))
        if self.is_whole(mode) or not any(others):
            return False
        reason = "another process has a batch that can't be recorded."
        self.reasons[mode, None] = "", reason
        return True

    def describe(self) -> Iterator[str]:
        """Say why the module itself runs, for each purpose and form for which it does."""
        alike: Dict[Tuple[Mode, str], List[str]] = {}
        for (mode, _), (shapes, reason) in self.reasons.items():
            alike.setdefault((mode, reason), []).append(shapes)
        for (mode, reason), forms in alike.items():
            is_whole = self.is_whole(mode)
            yield (
                f"{'It' if is_whole else 'Batches of ' + '; '.join(forms)} can't be recorded to "
                f"{mode.value}, so {self.chooser} runs {'it' if is_whole else 'them'} eagerly: "
                f"{reason}"
            )

    def choices(self) -> Dict[str, str]:
        """Return for each purpose whether it runs eagerly, for a checkpoint."""
        return {
            **{_KEY + mode.value: _RECORDED for mode in self.recorded},
            **{_KEY + m.value: self.reasons[m, None][1] for m in Mode if self.is_whole(m)},
            **{_KEY + name: _UNREACHED for name in self.unreached},
        }

    def prefer(self, choices: Mapping[str, str]) -> Dict[str, str]:
        """Run eagerly what another run did; return the choices that are about something else."""
        for mode in Mode:
            choice = choices.get(_KEY + mode.value)
            if choice == _RECORDED:
                self.recorded.add(mode)
            elif choice is not None:
                self.reasons[mode, None] = "", choice
        self.unreached = [
            name[len(_KEY) :] for name, choice in choices.items() if choice == _UNREACHED
        ]
        return {name: value for name, value in choices.items() if not name.startswith(_KEY)}


# In a checkpoint: the key of a purpose or a parameter, and values that are no reason.
_KEY, _RECORDED, _UNREACHED = "recorded: ", "is", "has no gradient"


def _of_recording(error: Exception) -> Exception:
    """Return the error of the recording itself, of one about the last micro-batch of an epoch."""
    cause = error.__cause__ if isinstance(error, DataError) else error
    return cause if isinstance(cause, CaptureError) else error


TRAINING, INFERENCE = "training_options", "inference_options"


def role_of(mode: Mode) -> str:
    """The argument of ``compile`` that holds the options for such a program."""
    return TRAINING if mode is Mode.TRAIN else INFERENCE
