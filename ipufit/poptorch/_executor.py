"""Models of the device: compiled at their first call, with weights that follow the host's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import secrets
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional, TypeVar, Union

import torch
from torch import Tensor, nn

from ipufit.poptorch import _saving, poptorch_core, profiling
from ipufit.poptorch._arguments import ArgumentParser, Arguments
from ipufit.poptorch._compiled import Compiled, Inspection
from ipufit.poptorch._device import ParameterProxy, ReplicaGrouping
from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._operators.scopes import module_repr
from ipufit.poptorch._optimizer_link import IDLE, OptimizerLink
from ipufit.poptorch._options.compiler import model_options, report_ignored
from ipufit.poptorch._placement import DeviceAllocation, acquire
from ipufit.poptorch._program_files import Path
from ipufit.poptorch._tracing import tensors_in, untraced
from ipufit.poptorch._wrapping import HostWeights, check_module, check_not_wrapped, quietly
from ipufit.poptorch.enums import ConnectionType
from ipufit.poptorch.optim import SGD, StateSync
from ipufit.poptorch.options import Options

# PopTorch 3.4.0; what follows the plus is the engine, where PopTorch has its commit.
VERSION = "3.4.0+ipufit"


T = TypeVar("T")


def _without_backward(result: T) -> T:
    """Outputs that say why there is nothing to go back through."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If you're "
            "using a trainingModel, the backwards pass is performed automatically when invoking "
            "the model. If you're using an inferenceModel, you should use a trainingModel instead."
        )

    for tensor in tensors_in(result):
        tensor.backward = refuse  # type: ignore[method-assign]
    return result


F = TypeVar("F", bound=Callable[..., object])


def _spanned(method: F) -> F:
    """Make every call a span of the method's name on the channel ``self._profiling``."""

    @functools.wraps(method)
    def measured(self: PoplarExecutor, *args: object, **kwargs: object) -> object:
        with self._profiling.tracepoint(method.__name__):
            return method(self, *args, **kwargs)

    return measured  # type: ignore[return-value]


class PoplarExecutor(Inspection):
    """Model returned by :func:`trainingModel` and :func:`inferenceModel`; not to be made directly.

    Args:
        model: the module that is called, a shallow copy of the user's.
        options: they are frozen; the executor goes by a copy.
        training: whether weights are updated.
        poptorch_version: written into files.
        optimizer: torch's or PopTorch's; without one, SGD with a learning rate of 0.01.
        user_model: the user's, which is wrapped when training.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Optional[Options],
        training: bool,
        poptorch_version: str,
        optimizer: Optional[torch.optim.Optimizer] = None,
        user_model: Optional[nn.Module] = None,
    ) -> None:
        self._user_model = user_model or model
        self._model = model
        self._training = training
        self._version = poptorch_version
        self._options = model_options(options, training)
        self._parser = ArgumentParser(model)
        self._executable: Optional[Compiled] = None
        self._allocation: Optional[DeviceAllocation] = None
        self._groupings: Dict[str, ReplicaGrouping] = {}
        self._anchors: Dict[str, Tensor] = {}
        # Of the next device iteration's random numbers; None until it is drawn.
        self._seed: Optional[int] = None
        if self._options.exists("random_seed"):
            self._seed = self._options.random_seed
        self._optimizer: Optional[OptimizerLink] = None
        if training:
            check_module(self._user_model)
            # A look at the parameters of a wrapped model would ask this object, unfinished.
            used_optimizer = optimizer or SGD(self._user_model.parameters(), lr=0.01)
            self._optimizer = OptimizerLink(self._options, used_optimizer)
        elif optimizer is not None:
            raise AssertionError("Optimizer should be None for inference, got one. Leave it out.")
        self._options._freeze()
        self._host = HostWeights(self, self._user_model, training)
        kind = "trainingModel" if training else "inferenceModel"
        self._profiling = profiling.Channel(f"poptorch.{kind}")

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._user_model

    @property
    def options(self) -> Options:
        """A frozen copy of the options."""
        return self._options

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def __getattr__(self, attr: str) -> Any:
        if attr == "_user_model":
            raise AttributeError(attr)
        value = getattr(self._user_model, attr)
        if isinstance(value, nn.Parameter):
            return ParameterProxy(attr, value, self._groupings)
        return value

    @property
    def _state_sync(self) -> StateSync:
        """Synchronises the optimizer's state with the device's; idle without an optimizer."""
        return IDLE if self._optimizer is None else self._optimizer.sync

    @property
    def _executable_inputs(self) -> Optional[Arguments]:
        """The arguments that the program was compiled for, with tensors of device "meta".

        Published pipelines read the batch size off its ``args``.
        """
        return None if self._executable is None else self._executable.arguments

    # Compiling.

    def isCompiled(self) -> bool:
        """Return True if there is a program: compiled, and not destroyed."""
        return self._executable is not None

    def _program(self) -> Compiled:
        if self._executable is None:
            raise error(
                "Model has not been compiled or has been destroyed. Call it with inputs, or call "
                "compile(), first."
            )
        return self._executable

    @_spanned
    def compile(self, *args: object, **kwargs: object) -> None:
        """Record the program for inputs like these, without computing anything with their values.

        Args:
            args, kwargs: as for the model's forward; combined batches.
        """
        arguments = self._parser(args, kwargs, False)
        if self._executable is not None:
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(arguments)

    def _compile(self, arguments: Arguments) -> None:
        self._set_program(arguments)
        if self._options.connection_type != ConnectionType.Never:
            self._attach_or_forget()

    def _set_program(
        self, arguments: Arguments, saved: Optional[_saving.Saved] = None, filename: Path = ""
    ) -> None:
        """Record the program, or use the one from a file."""
        check_module(self._user_model)
        poptorch_core._validateOptions(self._options.toDict())
        report_ignored(self._options)
        trained: List[List[str]] = []
        if self._optimizer is not None:
            trained = self._host.trainable(self._optimizer.groups())
        bar = self._options._progress_bar
        shown = self._options._show_compilation_progress_bar and saved is None
        span = self._profiling.tracepoint("modelCompilation")
        with span, bar.around() if shown else contextlib.nullcontext(), quietly():
            program = Compiled(
                self._model,
                self._host.parameters(),
                self._host.buffers(),
                self._options,
                arguments,
                self._training,
                self._groupings,
                trained,
                None if saved is None else saved.recorded,
                None if saved is None else saved.wide,
            )
        if saved is not None:
            _saving.check_state(saved, filename, program.device.example(), trained)
            self._let_go()
        if self._optimizer is not None:
            self._optimizer.bind(program, trained, self._host)
        program.check_anchors()
        self._executable = program
        if self._seed is None:
            self._seed = secrets.randbits(31)

    @_spanned
    def compileAndExport(
        self, filename: Path, *args: object, export_model: bool = True, **kwargs: object
    ) -> None:
        """Compile the model and save it.

        Args:
            filename: as for :meth:`save`.
            args, kwargs: as for the model's forward.
            export_model: as for :meth:`save`.
        """
        self.compile(*args, **kwargs)
        self.save(filename, export_model)

    def save(self, filename: Path, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model to a file, which holds no code and is read without running any.

        Args:
            filename: its folder is made; a folder gets ``model.poptorch`` inside.
            export_model: write the module too, with its weights and its optimizer, for
                :func:`poptorch.load`; else the file is for :meth:`loadExecutable`.
            save_rng_state: write how far the random numbers have come.

        Raises:
            AssertionError: the folder is a file.
            Error: not compiled, or something that no file can hold.
        """
        program = self._program()
        rng = self.rng_state if save_rng_state else None
        model = self._user_model if export_model else None
        self.copyWeightsToHostIfNeeded()
        with self._profiling.tracepoint("saveExecutableToFile"):
            _saving.write(
                filename,
                self._version,
                program,
                self._options,
                self._groupings,
                model,
                self._optimizer,
                rng,
            )

    @_spanned
    def loadExecutable(self, filename: Path) -> None:
        """Load the program from a file instead of compiling; weights stay those of the module.

        Args:
            filename: written by :meth:`save`, from a model with the same weights and options.

        Raises:
            Error: it is no such file, of another version, damaged, or of another model.
        """
        saved = _saving.read(filename, self._version)
        self._install(dataclasses.replace(saved, optimizer_state=None, rng_state=None), filename)

    def _install(self, saved: _saving.Saved, filename: Path) -> None:
        _saving.check_fits(saved, filename, self._training, self._options, self._groupings)
        self._set_program(saved.arguments, saved, filename)
        if saved.optimizer_state is not None and self._optimizer is not None:
            self._optimizer.restore(saved.optimizer_state)
        if saved.rng_state is not None:
            self._seed = saved.rng_state[0]
        if self._options.connection_type == ConnectionType.Always:
            self._attach_or_forget()

    @_spanned
    def destroy(self) -> None:
        """Free the program and the device, and unwrap the user's model."""
        if self._executable is None:
            return
        self._let_go()
        self._host.unwrap()

    def _let_go(self) -> None:
        """Free the program and the device, after reading weights and optimizer state back."""
        if self._executable is None:
            return
        if self._training:
            self.copyWeightsToHostIfNeeded()
        self._forget()

    def _forget(self) -> None:
        if self._optimizer is not None:
            self._optimizer.release()
        if self._allocation is not None:
            self._allocation.release()
        self._executable = self._allocation = None

    def __del__(self) -> None:
        # Not of an object that was never finished, nor when Python itself is being taken down: it
        # empties modules at the end, and this one may come before what holds an executor.
        if sys is not None and not sys.is_finalizing() and self.__dict__.get("_executable"):
            # The garbage collector may come in the middle of another model's recording.
            with untraced():
                self._let_go()

    # Calling.

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the program; the first call compiles it.

        Args:
            args, kwargs: as for the model's forward; combined batches of
                ``mb * deviceIterations * replicas * gradientAccumulation`` samples.
        Returns:
            What forward returns; the output mode says of which micro-batches.
        Raises:
            Error: the arguments are not like those that the program was compiled for.
        """
        if self._options.connection_type == ConnectionType.Never:
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never): use "
                "model.compile(inputs) instead of model(inputs)"
            )
        arguments = self._parser(args, kwargs, self.isCompiled())
        if not self.isCompiled():
            self._compile(arguments)
        program = self._program()
        if self._allocation is None:
            self.attachToDevice()
        if not self._training and self._host.is_behind():
            logger.debug("Implicit copyWeightsToDevice()")
            self.copyWeightsToDevice()
        arguments.check_like(program.arguments)
        self._state_sync.send()
        with self._profiling.tracepoint("modelExecution"):
            result = program.run(arguments, self.rng_state[0])
        self.rng_state = [self.rng_state[0] + self._options.device_iterations]
        self._anchors = program.anchors
        if self._training and not program.is_synthetic:
            self._host.trained()
            self._state_sync.mark_updated()
        return _without_backward(result)

    # Weights.

    @_spanned
    def copyWeightsToHost(self) -> None:
        """Copy the device's weights into the parameters and buffers of the user's model."""
        self._host.pull(self._program().device)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the device's weights to the host if they are newer, and return True in that case."""
        if not self._host.is_dirty:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self.copyWeightsToHost()
        return True

    @_spanned
    def copyWeightsToDevice(self) -> None:
        """Copy the host's weights to the device, where they overwrite what training has changed."""
        device = self._program().device
        self._state_sync.refresh()
        self._host.push(device)

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that ``updatableNamedBuffers`` names to the device."""
        device = self._program().device
        names = self._options._Popart.options.get("updatableNamedBuffers")
        if names is None:
            raise error(
                "No named buffers marked as updatable via updatableNamedBuffers option. Call "
                "options.updatableNamedBuffers([...]) before wrapping the model."
            )
        self._host.push_buffers(device, names)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> Any:
        """Load weights into the user's model, and copy them to the device if it is attached.

        Args:
            state_dict, strict: as for :meth:`torch.nn.Module.load_state_dict`.
        """
        result = self._user_model.load_state_dict(state_dict, strict)
        if self._allocation is not None:
            self.copyWeightsToDevice()
        return result

    @_spanned
    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use new settings of the optimizer, or another optimizer, from the next run on.

        Args:
            optimizer: the same one with other values, or a new one of the same kind.
        """
        if self._optimizer is None:
            raise error("an inference model has no optimizer. Wrap it with poptorch.trainingModel.")
        self._optimizer.set(optimizer, self._allocation is not None)

    # The device.

    def isAttachedToDevice(self) -> bool:
        """Return True if the program has its device."""
        return self._allocation is not None

    def attachToDevice(self) -> None:
        """Acquire the device, and copy weights, optimizer state and random state to it."""
        self._program()
        if self._options.connection_type == ConnectionType.Never:
            raise AssertionError("Trying to attach to an offline device (ConnectionType.Never)")
        if self._allocation is not None:
            raise error("Device is already attached. Ask isAttachedToDevice() first.")
        self._attach()

    def _attach_or_forget(self) -> None:
        """Attach a new program to its device; if that fails, there is no compiled program."""
        try:
            self._attach()
        except BaseException:
            self._forget()
            raise

    def _attach(self) -> None:
        program = self._program()
        program.group.check(program.device)
        self._allocation = acquire(self._options, program.ipus)
        self.copyWeightsToDevice()
        self._state_sync.attach()

    def detachFromDevice(self) -> None:
        """Copy weights, optimizer state and random state to the host, and release the device."""
        self._program()
        if self._allocation is None:
            raise error("Device is not attached. Ask isAttachedToDevice() first.")
        if self._training:
            self.copyWeightsToHostIfNeeded()
        self._state_sync.refresh()
        self._allocation.release()
        self._allocation = None

    @property
    def rng_state(self) -> List[int]:
        """The seed of the next device iteration's random numbers: each takes the next number."""
        self._program()
        assert self._seed is not None, "drawn at the latest when compiling"
        return [self._seed]

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        self._program()
        self._seed = state[0]


def trainingModel(
    model: Union[nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a module whose forward returns a loss, for training.

    The module itself is wrapped too: its parameters come back from the device when they are looked
    at. ``destroy()`` undoes that.

    Args:
        model: with the loss inside; its mode (train or eval) is read when it is compiled.
        options: frozen from here on; the model goes by a copy.
        optimizer: SGD, Adam, AdamW, RMSprop of torch.optim or ``poptorch.optim``, or LAMB of the
            latter; without one, SGD with a learning rate of 0.01.

    Raises:
        AttributeError: not a module.
        RuntimeError: the module is wrapped already.
        AssertionError: another kind of optimizer.
    """
    module = model._user_model if isinstance(model, PoplarExecutor) else model
    check_not_wrapped(module)
    return PoplarExecutor(copy.copy(module), options, True, VERSION, optimizer, module)


def inferenceModel(
    model: Union[nn.Module, PoplarExecutor], options: Optional[Options] = None
) -> PoplarExecutor:
    """Wrap a module to run its forward alone.

    Args:
        model: a module, or the training model whose weights are to be shared. A function is taken
            too, and refused when it is compiled.
        options: frozen from here on; the model goes by a copy.

    Raises:
        Error: gradients would be accumulated.
    """
    module = model._user_model if isinstance(model, PoplarExecutor) else model
    called = copy.copy(module) if isinstance(module, nn.Module) else module
    return PoplarExecutor(called, options, False, VERSION)


def load(
    filename: Path, edit_opts_fn: Optional[Callable[[Options], None]] = None
) -> PoplarExecutor:
    """Load the compiled model of a file that ``compileAndExport`` or ``save`` has written.

    It goes on as the saved one would have: with its weights, and, if they were saved, the state of
    its optimizer and of its random numbers. The class of the module must be imported, or the
    module can't be called outside of the program. Nothing in the file is run.

    Args:
        filename: the file.
        edit_opts_fn: changes the options, which are those that were saved: the environment does
            not count. What a program is compiled for must stay.

    Raises:
        AssertionError: the file was saved with ``export_model=False``.
        Error: it is no such file, of another version, or damaged; or the options were changed in
            what the program is compiled for.
    """
    saved = _saving.read(filename, VERSION)
    if saved.model is None:
        name = "trainingModel" if saved.recorded.trace.training else "inferenceModel"
        raise AssertionError(
            f"{filename} is a valid PopTorch file but was created with 'export_model=False'. Wrap "
            f"the module with poptorch.{name}, then call loadExecutable({str(filename)!r}) on that."
        )
    options = saved.options.clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    if saved.recorded.trace.training:
        executor = trainingModel(saved.model, options, saved.optimizer)
    else:
        executor = inferenceModel(saved.model, options)
    executor._groupings.update(saved.groupings)
    executor._install(saved, filename)
    return executor
