"""Model: compile, fit, evaluate, predict. It checks its arguments and delegates."""

from __future__ import annotations

import abc
import os
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import nn

from ipufit.callbacks import Callback
from ipufit.callbacks.history import History
from ipufit.checkpoint.settings import Checkpoint
from ipufit.core import EngineName, Interval, Jit, OutputMode, PrecisionName, Verbose
from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import CompilerFunction
from ipufit.core.train_config import EMA, Clip, Memory, Outputs, Precision, Reduction
from ipufit.data.adapters import DataArguments
from ipufit.data.settings import Loading
from ipufit.engines.choice import engine_maker
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, first_line, shown
from ipufit.partition.request import Parallel
from ipufit.tracing.validate import refuse_unready
from ipufit.training import fit, makers_of_lightning_models, on_batch
from ipufit.training.compile import CompileConfig, build_session
from ipufit.training.fit_data import FitRequest, InferenceRequest
from ipufit.training.inspection import InspectionMixin
from ipufit.training.session import Session
from ipufit.utils.error_collector import ErrorCollector, one_of
from ipufit.utils.names import hinting, with_hints
from ipufit.utils.random_streams import LOCK

if TYPE_CHECKING:
    from ipufit.analysis.tuner import BatchSize, LearningRates
    from ipufit.planner.partition_plan import PartitionPlan


@with_hints()
class Model(InspectionMixin):
    """Trains, evaluates and runs a torch module as one recorded program.

    The module always has the weights: the trained ones after ``fit``, and the current ones when a
    callback reads them. A model is a context manager that closes itself. See docs/quickstart.md.

    Args:
        module: any ``torch.nn.Module``.
        engine: "embedded", which runs in plain PyTorch; "ipu", which needs the Poplar SDK;
            "ipu-standin", the IPU engine over a stand-in for PopTorch, to try it without an IPU; or
            a callable that returns an engine, such as a subclass of :class:`ipufit.engines.Engine`.
            "auto" uses the environment variable IPUFIT_ENGINE; without it, "ipu" if there are an
            SDK and an IPU, otherwise "embedded". See docs/ipu.md.
        device: device to run on; the module is moved there. None leaves it where it is.

    Attributes:
        module: the user's module.
        history: of the last ``fit``, even if it was interrupted or failed.
        stop_training: set it to True in a callback to end ``fit`` after the current execution.
        outputs: outputs of the module in the last training execution, for each micro-batch that
            ``outputs`` of ``compile`` chooses; set if a callback has ``wants_outputs``.
        extras: in batch hooks of callbacks, the fields of the execution's batches that forward does
            not take, such as ids: a dict for each micro-batch of this process.

    Raises:
        ConfigurationError: the module, engine or device is not valid.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Union[EngineName, Callable[[], Engine]] = "auto",
        device: Union[str, torch.device, None] = None,
    ) -> None:
        faults = ErrorCollector(of_call=True)
        with faults.collect():
            if not isinstance(module, nn.Module):
                raise ConfigurationError(
                    f"Model takes a torch.nn.Module object, got {shown(module)}. Pass an instance, "
                    "such as ipufit.Model(MyNet())."
                )
            refuse_unready(module, may_be_lazy=True)
        with faults.collect():
            self._make_engine = engine_maker(engine)
        with faults.collect():
            check_device(device)
        faults.raise_all()
        self.module: nn.Module = module if device is None else module.to(device)
        self.history: History = History()
        self.stop_training: bool = False
        self.outputs: List[Any] = []
        self.extras: List[Mapping[str, object]] = []
        self._session: Optional[Session] = None
        self._predictor: Optional[Session] = None

    @property
    def hyperparameters(self) -> Dict[str, Any]:
        """Settings that the module declares, for experiment loggers.

        They are the ``hparams`` of a LightningModule; other modules have none.
        """
        return {}

    @classmethod
    def from_lightning(
        cls,
        module: nn.Module,
        engine: Union[EngineName, Callable[[], Engine]] = "auto",
        device: Union[str, torch.device, None] = None,
    ) -> StepsModel:
        """Make a model of a LightningModule, with its steps, optimizers, hooks and ``self.log``.

        ``fit`` runs ``training_step`` and ``validation_step``, ``evaluate`` runs
        ``validation_step``, ``test`` runs ``test_step`` and ``predict`` runs ``predict_step``, each
        as one recorded program. ``compile`` is only needed for options: the optimizer comes from
        ``configure_optimizers``. It supports Lightning 2.1 and newer; see
        docs/coming-from-lightning.md.

        Args:
            module: of ``lightning.pytorch`` or ``pytorch_lightning``; neither is imported.
            engine: as for :class:`ipufit.Model`.
            device: as for :class:`ipufit.Model`.

        Returns:
            A model with all methods of :class:`ipufit.Model`, and ``test``. These methods differ:
            ``compile(optimizer=None, **options)``; ``fit(x=None, y=None, batch_size=None, epochs=1,
            *, datamodule=None, **options)``, which validates if there is validation data;
            ``evaluate(x=None, y=None, batch_size=None, *, datamodule=None, **options)``;
            ``test(x=None, y=None, *, datamodule=None, **options)``; ``predict(x=None,
            batch_size=None, *, datamodule=None, **options)``. Data may be a LightningDataModule, as
            ``x`` or ``datamodule``; without data, the loaders are those of the LightningModule. Its
            attribute ``lightning`` is the LightningModule; ``module`` wraps it, and has its steps
            as ``forward``.

        Raises:
            ConfigurationError: it is not a LightningModule, or uses features that a recorded
                program can't have; with every fault.
        """
        model: StepsModel = makers_of_lightning_models[-1](module, engine, device)
        return model

    def compile(
        self,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        *,
        inputs: Union[str, Sequence[str], Mapping[str, str], None] = None,
        targets: Union[str, Sequence[str], None] = None,
        jit: Union[Jit, str, CompilerFunction] = "auto",
        lr_scheduler: Any = None,
        lr_scheduler_interval: Interval = "update",
        reduction: Optional[Reduction] = None,
        clip: Optional[Clip] = None,
        ema: Optional[EMA] = None,
        precision: Union[PrecisionName, Precision, None] = None,
        outputs: Union[OutputMode, Outputs, None] = None,
        parallel: Union[Parallel, PartitionPlan, None] = None,
        memory: Optional[Memory] = None,
        detect_nan: bool = False,
        max_recordings: int = 16,
        poptorch: Any = None,
        config: Any = None,
    ) -> None:
        """Set optimizer, loss, metrics and options. The count of updates starts again at 0.

        Positional arguments have the order of Keras 3.

        See docs/optimizers-losses-metrics.md, docs/precision-and-gradients.md,
        docs/logging-values.md, docs/memory.md and docs/speed.md.

        Args:
            optimizer: a name ("sgd", "adam", "adamw", "rmsprop", "lamb" or any other of
                torch.optim), an optimizer class, a torch optimizer for the module's parameters (its
                state is used), or a factory that is called with the trainable parameters. With
                None, the model can only evaluate and predict.
            loss: a name, a module or a class of modules, or a callable ``(prediction, target)``
                that returns the mean over a micro-batch or one value per sample; None if the module
                returns ``(outputs, loss)`` itself. Several losses are a dict by output name, or a
                list by position. A :class:`ipufit.TrainStep`, or a list of them, is your own
                training step: which loss trains which parameters, in which order, and how often.
            loss_weights: factor for each of several losses, in the form of the losses; 1 by
                default.
            metrics: names, callables ``(prediction, target)`` or torchmetrics objects; one, a list,
                or a dict by name; with several losses a dict or list by output. Losses and metrics
                with parameters such as ``y_true, y_pred`` are called in that order.
            weighted_metrics: metrics that are weighted with the sample weights, in the form of
                ``metrics``.
            run_eagerly: call the module itself instead of a recorded program: the same numbers,
                slower, but you can use a debugger, and any module works that a hand-written loop
                can train.
            inputs: for batches that are dicts, the fields that forward gets: one name, passed by
                position; a list of names, passed by name; or a dict from parameters of forward to
                names. None means all fields that are parameters of forward. Other fields are not
                part of the program: metrics get them through parameters of the same name, callbacks
                as ``extras``.
            targets: for batches that are dicts, the field that the loss compares outputs with, or a
                list of names for a dict of targets. None is the only field that forward does not
                take.
            jit: how a recorded program runs: "graph", as recorded, with the same bits as
                run_eagerly; "kernels", with other kernels of torch that are faster on this machine,
                equal up to the order of summation; "inductor", updates compiled on the CPU
                before they are made, also equal up to the order of summation; "cudagraph", whole
                executions as captured CUDA graphs. "auto" captures CUDA graphs on a GPU, chooses by
                measurement on a CPU, and calls a module itself, with a warning, if it can't be
                recorded; ``explain`` and ``History.params["jit"]`` show the choice. Any other name,
                such as "aot_eager" or "openxla", or a function is a backend of torch.compile, which
                gets the recorded graphs; its results must be equal up to the order of summation.
            lr_scheduler: hyper-parameters that change from update to update: "cosine", a torch
                scheduler, and more; see :func:`ipufit.optim.schedules.resolve_schedule`.
            lr_scheduler_interval: "update" or "epoch": how often the schedule advances.
            reduction: how samples, sample weights and micro-batches count in a gradient; see
                :class:`ipufit.Reduction`. By default, the mean over all samples.
            clip: limit for gradients; see :class:`ipufit.Clip`.
            ema: keep an exponential moving average of the trained weights, which replaces the
                weights when ``fit`` ends; see :class:`ipufit.EMA`.
            precision: a name such as "mixed_float16", or a :class:`ipufit.Precision`, for example
                with a loss scale.
            outputs: which outputs of a training execution are copied to the host, for metrics and
                callbacks: "all", "final", "sum", or ``ipufit.Outputs("every_n", 4)``; see
                :class:`ipufit.Outputs`. None is the setting of ``config`` or ``poptorch``, or
                "all".
            parallel: stages or layers on each IPU, as a :class:`ipufit.Parallel` or a plan of
                :meth:`plan`.
            memory: layers in parts, recomputation, offloading and sharding, to need less memory;
                see :class:`ipufit.Memory`.
            detect_nan: check gradients and weights in every update, not only losses. If one is not
                finite, that update runs again operator by operator, and
                :class:`ipufit.errors.NonFiniteLossError` names the module, the operator, the line
                and the samples where it began. Only with one process and the embedded engine.
            max_recordings: largest number of batch shapes that a program records, or compiles for
                an IPU; another shape is an error that lists them. Each recording takes time and
                memory; with run_eagerly, nothing is recorded. See docs/data.md.
            poptorch: ``poptorch.Options`` for training, or a pair ``(training_options,
                inference_options)``, where the second are for validation, ``evaluate`` and
                ``predict``; copies are used. Their replicas, device iterations, accumulation and
                seed apply to later calls; an argument that disagrees is refused. Without IPUs, the
                effect of each option is printed.
            config: an :class:`ipufit.IPUConfig`, or an argument of its ``from_pretrained``. Its
                IPUs, device iterations, accumulation and seed apply to later calls; an argument
                that disagrees is refused. The effect of each parameter is printed. See
                docs/ipu-config.md.

        Raises:
            UnknownNameError: an unknown name; suggests the nearest known one.
            OptimizerError: the optimizer does not fit the module, or nothing is trainable.
            ConfigurationError: anything else that can't work, or several of these.
        """
        arguments = dict(locals())
        del arguments["self"]
        if self._session is not None and self._session.is_training:
            raise ConfigurationError(
                "compile was called inside fit, from a callback or the data. Call it after fit has "
                "returned."
            )
        faults = ErrorCollector(of_call=True)
        config = CompileConfig.read(faults, **arguments)
        session = build_session(self.module, self._make_engine, config, faults)
        self._retire(session)

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer that ``compile`` got or created, with its current state, or None.

        With several processes and ``Memory(shard="optimizer")``, it has no state: see
        :meth:`gather_optimizer`.
        """
        return self._compiled("optimizer").optimizer

    def gather_optimizer(self) -> Optional[torch.optim.Optimizer]:
        """Return the optimizer with its whole state, even if ``Memory.shard`` has divided it.

        In that case :attr:`optimizer` has only settings. Call this in all processes at the same
        time, between fits or from a callback. The state is there until the next execution; until
        then, at the end of an epoch or between fits, you may change it, in the same way in all
        processes.
        """
        return self._compiled("gather_optimizer").gather_optimizer()

    def gather_weights(self) -> nn.Module:
        """Return the module with its current weights, under ``Memory(shard="weights")`` too.

        Otherwise its weights during ``fit`` are those of the end of the last epoch. Call this in
        all processes at the same time, from a callback. Outside of ``fit``, the module always has
        its weights.
        """
        self._compiled("gather_weights").gather_weights()
        return self.module

    def swap_ema_weights(self) -> None:
        """Exchange the trained weights and their averages; a second call exchanges them back.

        For callbacks during ``fit``, such as :class:`ipufit.callbacks.SwapEMAWeights`. Exchange
        them back before training continues.

        Raises:
            ConfigurationError: not inside ``fit``, or ``compile`` was given no ``ema``.
        """
        self._compiled("swap_ema_weights").swap_averages()

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on recording programs since ``compile``."""
        return self._session.engine.seconds if self._session else 0.0

    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: Optional[int] = None,
        epochs: Union[int, range] = 1,
        verbose: Verbose = "auto",
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Optional[bool] = None,
        class_weight: Optional[Mapping[int, float]] = None,
        sample_weight: Any = None,
        *,
        steps_per_epoch: Optional[int] = None,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        checkpoint: Union[str, os.PathLike[str], Checkpoint, None] = None,
        loading: Optional[Loading] = None,
        seed: Optional[int] = None,
    ) -> History:
        """Train the module. See docs/data.md for the forms of ``x``, docs/plan.md for the terms.

        Positional arguments have the order of Keras.

        Args:
            x: a tensor, a NumPy array (memory-mapped ones are read a batch at a time), a list of
                numbers, a DataFrame or Series of pandas or polars, a sparse matrix of SciPy, or a
                dict, tuple or list of such, with one row per sample; a map-style or iterable
                Dataset; a ``keras.utils.PyDataset``; a DataLoader; or any iterable of batches
                ``(inputs, target)`` or ``(inputs, target, sample_weight)``. A loader's batch size
                is the micro-batch; its sampler, collate_fn, workers and generator are used as they
                are.
            y: targets for tensors and arrays, in any structure, with one row per sample.
            batch_size: of tensors, arrays and datasets: the micro-batch. None is 32.
            epochs: how many, or a range of their indices, such as range(3, 10) for those that
                follow the first three.
            verbose: 0 silent, 1 a progress bar, 2 a line per epoch, "rich" a bar by the package of
                that name (``pip install ipufit[rich]``); "auto" is 1 in a terminal or a notebook,
                else 2.
            callbacks: one, a list, or None; see :class:`ipufit.callbacks.Callback`.
                :class:`ipufit.Report` records where time and memory of a run go.
            validation_split: the last fraction of tensors, arrays or a map-style dataset is held
                out, before shuffling.
            validation_data: evaluated after every epoch, without an effect on training. ``(x, y)``
                or ``(x, y, sample_weight)`` of tensors and arrays, as a tuple or list, or any other
                form of ``x``; or an :class:`ipufit.Validation`, which also sets how often and how
                much.
            shuffle: tensors, arrays, map-style datasets and the batches of a PyDataset in every
                epoch, in an order that depends only on seed and epoch. None is True for these; a
                loader has its own order.
            class_weight: weight of the samples by class index; other classes weigh 1. The target
                holds class indices, or rows of probabilities.
            sample_weight: how much each sample counts, for tensors and arrays; shape (samples,) or
                more dimensions. Integers and bools become floating point.
            steps_per_epoch: weight updates of an epoch. The next epoch continues with the data
                where this one ends; data that runs out is read again.
            ipus: total number of IPUs (of each process, if there are several), a multiple of the
                IPUs of a replica. None is the number of ``compile(config=...)``, or one replica.
            device_iterations: weight updates per execution. None is the number of
                ``compile(config=...)``, or 1.
            gradient_accumulation: micro-batches that a replica sums before an update; None as for
                ``device_iterations``.
            checkpoint: folder for checkpoints, from which the run can resume exactly; or an
                :class:`ipufit.Checkpoint`, which also sets how often to save, and where to resume.
            loading: how much of the data is read, and how far ahead; None reads all.
            seed: for all random numbers: dropout and similar layers, the order of samples, and
                numbers that a loader draws from torch's generator in this process. None is the seed
                of ``config`` or ``poptorch`` of ``compile``, or one drawn from torch's generator.

        Returns:
            The history, which is also in ``self.history``, even if this call raises an error.

        Raises:
            NotCompiledError: before ``compile``.
            PlanError: the numbers of the plan are not possible; with every fault.
            ConfigurationError: arguments that can't work, alone or together; with every fault.
                ``LossError``, ``MetricError`` and ``OptimizerError`` are subclasses, for a loss, a
                metric or an optimizer that does not fit module and data.
            DataError: data that can't be read or used; names batch and sample if they are known.
            CaptureError: the module can't be recorded; names file and line.
            NonFiniteLossError: NaN or infinity; the state is that before the update, which the
                error names.
            CheckpointError: a checkpoint can't be written or read, or belongs to another run.
        """
        arguments = dict(locals())
        later = "Start the second call after the first has returned."
        session = self._trainable("fit", later)
        data = DataArguments(
            "training data", x, y, sample_weight, class_weight, batch_size, shuffle
        )
        return fit.fit(self, session, FitRequest.of(data, arguments))

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: Optional[int] = None,
        verbose: Verbose = "auto",
        sample_weight: Any = None,
        steps: Optional[int] = None,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        return_dict: bool = True,
        *,
        loss: object = None,
        metrics: object = None,
        prefetch: Optional[int] = None,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        seed: Optional[int] = None,
    ) -> Union[float, List[float], Dict[str, float]]:
        """Compute loss and metrics, as exact means over all samples, with the module in eval mode.

        A model that is not compiled takes ``loss`` and ``metrics`` here. Each such call records the
        module again; for several calls, use ``compile(loss=...)`` first.

        Args:
            x: as for ``fit``; never shuffled by ipufit.
            y: as for ``fit``.
            batch_size: as for ``fit``.
            verbose: 0 silent, 1 a progress bar, 2 one line; other values as for ``fit``.
            sample_weight: as for ``fit``.
            steps: largest number of device iterations, from the start of the data; None for all.
            callbacks: get the ``on_test_`` hooks.
            return_dict: False returns the loss, or with metrics a list that begins with it, as in
                Keras.
            loss: as for ``compile``, for a model that is not compiled.
            metrics: as for ``compile``, for a model that is not compiled.
            prefetch: as for :class:`ipufit.Loading`.
            ipus: total number of IPUs. None is the number of ``compile(config=...)``, or one
                replica.
            device_iterations: forward passes per execution; None is the number of the config, or 1.
            seed: for random numbers that the module draws in eval mode; None is 0, or the seed of
                ``compile``.

        Returns:
            "loss", and one value per metric and logged name.

        Raises:
            NotCompiledError: before ``compile``, without ``loss`` and ``metrics``.
            PlanError: the numbers of the plan are not possible; with every fault.
            ConfigurationError: arguments that can't work, alone or together; with every fault.
            DataError: data that can't be read or used.
        """
        arguments = dict(locals())
        faults = ErrorCollector(of_call=True)
        session = None
        with faults.collect():
            one_of("return_dict", return_dict, (True, False))
        is_compiled = loss is None and metrics is None
        with faults.collect():
            session = None if is_compiled else self._compile_to_infer(loss, metrics)
        # With faults in loss and metrics, the other arguments are checked all the same.
        session = session or self._compiled("evaluate" if is_compiled else "predict")
        data = DataArguments("evaluation data", x, y, sample_weight, batch_size=batch_size)
        values = fit.evaluate(self, session, InferenceRequest.of(data, arguments), faults)
        return on_batch.as_keras_returns(values, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: Optional[int] = None,
        verbose: Verbose = "auto",
        steps: Optional[int] = None,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        *,
        prefetch: Optional[int] = None,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        padding_value: Optional[float] = None,
        seed: Optional[int] = None,
    ) -> Any:
        """Compute the outputs for all samples, in the data's order; works without ``compile``.

        Args:
            x: as for ``fit``: inputs as a tensor, an array or a dict of such, or a tuple or list of
                such where ``forward`` takes several; or batches of inputs, ``(inputs, target)`` or
                ``(inputs, target, sample_weight)``, of which only the inputs are used.
            batch_size: as for ``fit``.
            verbose: as for ``evaluate``.
            steps: largest number of device iterations, from the start of the data; None for all.
            callbacks: get the ``on_predict_`` hooks.
            prefetch: as for :class:`ipufit.Loading`.
            ipus: total number of IPUs. None is the number of ``compile(config=...)``, or one
                replica.
            device_iterations: forward passes per execution; None is the number of the config, or 1.
            padding_value: pads outputs of several shapes, at the end of every dimension, to one
                tensor; None returns a list with a tensor for each sample instead.
            seed: for random numbers that the module draws in eval mode; None is 0, or the seed of
                ``compile``.

        Returns:
            The structure that the module returns, each tensor with one row per sample; if rows have
            several shapes, a list of rows instead of the tensor.

        Raises:
            PlanError: the numbers of the plan are not possible; with every fault.
            ConfigurationError: arguments that can't work, alone or together; with every fault.
            DataError: data that can't be read or used, or an output without a row per sample.
        """
        return fit.predict(self, *self._prediction(dict(locals())))

    def predict_iter(
        self,
        x: Any,
        batch_size: Optional[int] = None,
        verbose: Verbose = 0,
        steps: Optional[int] = None,
        callbacks: Union[Callback, Sequence[Callback], None] = (),
        *,
        prefetch: Optional[int] = None,
        ipus: Optional[int] = None,
        device_iterations: Optional[int] = None,
        padding_value: Optional[float] = None,
        seed: Optional[int] = None,
    ) -> Iterator[Any]:
        """Yield the outputs of ``predict`` one execution at a time, to save memory.

        See docs/finding-settings.md.

        Args:
            x: as for ``predict``.
            batch_size: as for ``fit``.
            verbose: as for ``evaluate``.
            steps: largest number of device iterations, from the start of the data; None for all.
            callbacks: get the ``on_predict_`` hooks; ``on_predict_end`` after the last execution.
            prefetch: as for :class:`ipufit.Loading`.
            ipus: total number of IPUs. None is the number of ``compile(config=...)``, or one
                replica.
            device_iterations: forward passes per execution, which is one result; None is the number
                of the config, or 1.
            padding_value: as for ``predict``; each result is padded separately.
            seed: for random numbers that the module draws in eval mode; None is 0, or the seed of
                ``compile``.

        Returns:
            An iterator over the outputs of each execution, in order; together they have one row per
            sample. Arguments are checked by the call, batches when they are read.

        Raises:
            PlanError: the numbers of the plan are not possible; with every fault.
            ConfigurationError: as for ``predict``; also while iterating, if the weights have
                changed, or the model was compiled or closed.
            DataError: data that can't be read or used, or an output without a row per sample.
        """
        return fit.stream(self, *self._prediction(dict(locals())))

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Optional[Mapping[int, float]] = None,
        return_dict: bool = True,
    ) -> Union[float, List[float], Dict[str, float]]:
        """Make one weight update with one batch, on one replica.

        The count of updates, the schedule, moving averages and the loss scale continue from call to
        call; dropout draws other numbers each time. ``fit`` is faster, because it copies the
        weights only once. See docs/finding-settings.md.

        Args:
            x: inputs of one batch: tensors, arrays, or a structure of them.
            y: targets.
            sample_weight: how much each sample counts.
            class_weight: how much samples count, by class index.
            return_dict: False returns the loss, or with metrics a list that begins with it, as in
                Keras.

        Returns:
            "loss", and one value per metric and logged name, for the batch before the update.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: inside ``fit``, or without an optimizer.
            DataError: the batch can't be used.
            NonFiniteLossError: NaN or infinity; the state is that before the update.
        """
        one_of("return_dict", return_dict, (True, False))
        session = self._trainable("train_on_batch")
        batch = on_batch.as_batch(x, y, sample_weight)
        values = on_batch.train_on_batch(session, batch, class_weight, session.seed())
        return on_batch.as_keras_returns(values, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = True
    ) -> Union[float, List[float], Dict[str, float]]:
        """Compute loss and metrics for one batch.

        Args:
            x: inputs of one batch: tensors, arrays, or a structure of them.
            y: targets.
            sample_weight: how much each sample counts.
            return_dict: as for :meth:`train_on_batch`.

        Returns:
            "loss", and one value per metric and logged name, with the current weights.

        Raises:
            NotCompiledError: before ``compile``.
            DataError: the batch can't be used.
        """
        one_of("return_dict", return_dict, (True, False))
        session = self._compiled("test_on_batch")
        values = on_batch.test_on_batch(session, on_batch.as_batch(x, y, sample_weight))
        return on_batch.as_keras_returns(values, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Compute the module's outputs for one batch.

        Args:
            x: inputs of one batch: tensors, arrays, or a structure of them.

        Returns:
            The structure that the module returns, each tensor with one row per sample.

        Raises:
            DataError: the batch can't be used.
        """
        session = self._compiled("predict_on_batch")
        is_whole = session.loss.own_loss(Mode.PREDICT)
        inputs = on_batch.as_batch(x, None, None)
        return on_batch.predict_on_batch(session, inputs if is_whole else (inputs,))

    def find_lr(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: Optional[int] = None,
        min_lr: float = 1e-7,
        max_lr: float = 10.0,
        updates: int = 100,
        ipus: Optional[int] = None,
        gradient_accumulation: Optional[int] = None,
        seed: Optional[int] = None,
    ) -> LearningRates:
        """Train for a short time with a learning rate that grows from update to update.

        Weights, buffers, optimizer state, counters and random number generators are restored to the
        bit. The rates of several parameter groups keep their ratios. See docs/finding-settings.md.

        Args:
            x: data, as for ``fit``, except iterators, because it may be read several times.
            y: as for ``fit``.
            batch_size: as for ``fit``.
            min_lr: rate of the first update.
            max_lr: rate of the last one.
            updates: how many; fewer if the loss grows to four times its best value.
            ipus: as for ``fit``.
            gradient_accumulation: as for ``fit``.
            seed: as for ``fit``.

        Returns:
            The rates and losses, with a suggestion and a plot.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: arguments that can't work, or inside ``fit``.
            DataError: data that can't be read or used, or that can be read only once.
        """
        # Imported here, as below: few programs look for a setting.
        from ipufit.analysis import tuner

        session = self._trainable("find_lr")
        data = DataArguments("training data", x, y, batch_size=batch_size, shuffles=True)
        rates = (min_lr, max_lr, updates)
        trial = tuner.Trial(session, self._make_engine)
        return tuner.find_lr(trial, data, rates, ipus, gradient_accumulation, seed)

    def find_batch_size(
        self,
        x: Any,
        y: Any = None,
        *,
        effective_batch_size: int,
        start: int = 2,
        ipus: Optional[int] = None,
        seed: Optional[int] = None,
    ) -> BatchSize:
        """Find the largest micro-batch that fits into memory, at constant samples per update.

        One update runs with each size that divides the effective batch, starting from ``start`` and
        doubling each time; ``gradient_accumulation`` is adjusted. Nothing of the model changes. On
        a CPU, memory rarely runs out, so look at the rates in ``tried`` too. See
        docs/finding-settings.md.

        Args:
            x: tensors, arrays or a dataset; not a loader, which has its own batch size.
            y: as for ``fit``.
            effective_batch_size: samples of an update, on all replicas together.
            start: the smallest micro-batch to try.
            ipus: as for ``fit``.
            seed: as for ``fit``.

        Returns:
            ``batch_size`` and ``gradient_accumulation`` for ``fit``.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: arguments that can't work, inside ``fit``, or even the smallest size
                does not fit.
            DataError: data that can't be read or used.
        """
        from ipufit.analysis import tuner

        trial = tuner.Trial(self._trainable("find_batch_size"), self._make_engine)
        return tuner.find_batch_size(trial, x, y, effective_batch_size, start, ipus, seed)

    def save_weights(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write the module's weights to a file; also possible in a callback.

        The file has ``module.state_dict()`` in the format of safetensors:
        ``module.load_state_dict(safetensors.torch.load_file(path))`` reads it without ipufit. It
        appears under its name only when it is complete, so an interrupted write keeps an existing
        file.

        Args:
            path: ends with ".safetensors"; its folder must exist.

        Raises:
            ConfigurationError: the path can't be written, or the state has values that are not
                tensors.
        """
        self._write_weights(path, False)

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write the module's weights to a file, with information about the module.

        The file is that of :meth:`save_weights`, with the module's class, the number of updates and
        the versions in its metadata. :func:`ipufit.load` makes a model from it.

        Args:
            path: ends with ".safetensors"; its folder must exist.

        Raises:
            ConfigurationError: the path can't be written, or the state has values that are not
                tensors.
        """
        self._write_weights(path, True)

    def _write_weights(self, path: Union[str, os.PathLike[str]], is_described: bool) -> None:
        # Imported here, as below: many programs have no files of weights.
        from ipufit.core.weights_file import check_path, described, save_weights

        check_path(path)
        session, updates = self._session, 0
        if session is not None:
            session.enter_eval()
            updates = session.updates
        save_weights(self.module, path, described(self.module, updates) if is_described else None)

    def load_weights(self, path: Union[str, os.PathLike[str]], strict: bool = True) -> None:
        """Read a file of weights into the module's tensors, in place; also possible in a callback.

        Everything is compared before anything is changed.

        Args:
            path: of a safetensors file, or of a file ending with ".pt", ".pth" or ".bin" that
                ``torch.save(module.state_dict(), path)`` wrote, which needs torch 2.6 or newer and
                is read without unpickling anything but tensors.
            strict: all names and dtypes must agree; a floating-point dtype may become a wider one.
                False ignores names that only one side has, unless that is all, and converts
                dtypes.

        Raises:
            ConfigurationError: the file can't be read, or does not fit; lists all differences.
        """
        from ipufit.core.weights_file import load_weights

        load_weights(self.module, path, strict)

    def close(self) -> None:
        """Release recorded programs and the device; ``compile`` starts again. Safe to repeat."""
        self._retire(None)

    def _retire(self, successor: Optional[Session]) -> None:
        """Another session takes the place of the present one."""
        for session in (self._session, self._predictor):
            if session is not None:
                session.retire()
        self._session, self._predictor = successor, None

    def _compiled(self, name: str) -> Session:
        if not name.startswith("predict"):
            return super()._compiled(name)
        # Outputs need neither optimizer nor loss, which only compile can tell.
        with LOCK:
            return self._session or self._predictor or self._compile_to_infer("mse", None)

    def _prediction(
        self, arguments: Mapping[str, Any]
    ) -> Tuple[Session, InferenceRequest, ErrorCollector]:
        """The session that predicts, and the arguments of a prediction."""
        faults, session = ErrorCollector(of_call=True), self._compiled("predict")
        x, form = arguments["x"], session.form(Mode.PREDICT)
        role, size, are_inputs = "prediction data", arguments["batch_size"], form.are_inputs(x)
        data = DataArguments(role, x, batch_size=size, form=form, are_inputs=are_inputs)
        return session, InferenceRequest.of(data, arguments), faults

    def _compile_to_infer(self, loss: object, metrics: object) -> Session:
        """Return a session that only evaluates and predicts, for a model that has none."""
        if self._session is not None:
            raise ConfigurationError(
                "evaluate takes loss and metrics only for a model that was not compiled, but this "
                "one was compiled with a loss. Leave them out, or call model.compile(loss=...) "
                "again."
            )
        Model.compile(self, None, loss, metrics=metrics)
        self._predictor, self._session = self._session, None
        assert self._predictor is not None
        return self._predictor

    def __reduce__(self) -> str:
        raise ConfigurationError(
            "a Model contains recorded programs and devices, which can't be pickled or copied. "
            "Save its weights with model.save('model.safetensors') and read them with "
            "ipufit.load('model.safetensors', module); copy its module with "
            "copy.deepcopy(model.module)."
        )

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Options of a call by name, and what an evaluation returns.
CallOptions = Dict[str, Any]
Evaluated = Union[float, List[float], Dict[str, float]]


@with_hints(test="evaluate")
class StepsModel(Model, abc.ABC):
    """Model of a LightningModule, as :meth:`ipufit.Model.from_lightning` makes it.

    Arguments other than data, batch size and epochs must be passed by name.

    Args:
        module: as for :meth:`ipufit.Model.from_lightning`, which checks it.
        engine: as for :class:`ipufit.Model`.
        device: as for :class:`ipufit.Model`.

    Attributes:
        lightning: the LightningModule; ``module`` wraps it, and has its steps as forward.
    """

    lightning: nn.Module

    def fit(  # type: ignore[override]
        self,
        x: Any = None,
        y: Any = None,
        batch_size: Optional[int] = None,
        epochs: Union[int, range] = 1,
        *,
        datamodule: Any = None,
        **options: Any,
    ) -> History:
        """Train with ``training_step``, and validate with ``validation_step``.

        Args:
            x: as for :meth:`ipufit.Model.fit`, or a LightningDataModule; None takes
                ``train_dataloader`` and ``val_dataloader`` of the LightningModule.
            y: as for :meth:`ipufit.Model.fit`; a batch is then ``(x, y)``.
            batch_size: as for :meth:`ipufit.Model.fit`.
            epochs: as for :meth:`ipufit.Model.fit`.
            datamodule: a LightningDataModule instead of x.
            options: as for :meth:`ipufit.Model.fit`.

        Raises:
            ConfigurationError: as for :meth:`ipufit.Model.fit`; or no data, or several loaders.
        """
        options.update(batch_size=batch_size, epochs=epochs)
        return self._fit(x, y, datamodule, options)

    def evaluate(  # type: ignore[override]
        self,
        x: Any = None,
        y: Any = None,
        batch_size: Optional[int] = None,
        *,
        datamodule: Any = None,
        **options: Any,
    ) -> Union[float, List[float], Dict[str, float]]:
        """Evaluate with ``validation_step``: the values that it logs, and its loss, if any.

        Args:
            x: as for :meth:`ipufit.Model.evaluate`, or a LightningDataModule; None takes
                ``val_dataloader`` of the LightningModule.
            y: as for ``fit``.
            batch_size: as for ``fit``.
            datamodule: a LightningDataModule instead of x.
            options: as for :meth:`ipufit.Model.evaluate`.
        """
        options["batch_size"] = batch_size
        return self._evaluate("validate", x, y, datamodule, options)

    def test(
        self, x: Any = None, y: Any = None, *, datamodule: Any = None, **options: Any
    ) -> Union[float, List[float], Dict[str, float]]:
        """Evaluate with ``test_step``: the values that it logs, and its loss, if any.

        Args:
            x: as for :meth:`ipufit.Model.evaluate`, or a LightningDataModule; None takes
                ``test_dataloader`` of the LightningModule.
            y: as for ``fit``.
            datamodule: a LightningDataModule instead of x.
            options: as for :meth:`ipufit.Model.evaluate`.
        """
        return self._evaluate("test", x, y, datamodule, options)

    def predict(  # type: ignore[override]
        self,
        x: Any = None,
        batch_size: Optional[int] = None,
        *,
        datamodule: Any = None,
        **options: Any,
    ) -> Any:
        """Predict with ``predict_step``, whose results are joined over all batches.

        Args:
            x: as for :meth:`ipufit.Model.predict`, or a LightningDataModule; None takes
                ``predict_dataloader`` of the LightningModule.
            batch_size: as for ``fit``.
            datamodule: a LightningDataModule instead of x.
            options: as for :meth:`ipufit.Model.predict`.
        """
        options["batch_size"] = batch_size
        return self._predict(x, datamodule, options)

    @abc.abstractmethod
    def _fit(self, x: object, y: object, datamodule: object, options: CallOptions) -> History:
        """Train with the data and options of :meth:`fit`."""

    @abc.abstractmethod
    def _evaluate(
        self, stage: str, x: object, y: object, datamodule: object, options: CallOptions
    ) -> Evaluated:
        """Evaluate in the stage "validate" or "test", with the data and options of that call."""

    @abc.abstractmethod
    def _predict(self, x: object, datamodule: object, options: CallOptions) -> Any:
        """Predict with the data and options of :meth:`predict`."""


def check_device(device: Union[str, torch.device, None]) -> None:
    """Make sure that tensors can be on a device.

    Raises:
        ConfigurationError: this torch has no such device.
    """
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device must be one that torch can use here, got {str(device)!r}, of which torch "
            f"{torch.__version__} says: {first_line(error)}. Leave it out to run where the module "
            "is, or pass device='cpu'."
        ) from error


@hinting(Model)
def load(
    path: Union[str, os.PathLike[str]],
    module: nn.Module,
    engine: Union[EngineName, Callable[[], Engine]] = "auto",
    device: Union[str, torch.device, None] = None,
) -> Model:
    """Make a model of a module, with the weights of a file.

    A torch module is code, which should not come from a file, so you pass the module.

    Args:
        path: of a file of :meth:`ipufit.Model.save` or ``save_weights``, of any safetensors file
            with these names, or of one that ``torch.save(module.state_dict(), path)`` wrote.
        module: like the one that was saved; its weights become those of the file.
        engine: as for :class:`ipufit.Model`.
        device: as for :class:`ipufit.Model`.

    Raises:
        ConfigurationError: the file can't be read, or does not fit the module, which then does not
            change.
    """
    model = Model(module, engine, device)
    model.load_weights(path)
    return model
