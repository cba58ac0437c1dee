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
from ipufit.data.adapters import DataArguments, are_inputs
from ipufit.data.settings import Loading
from ipufit.engines.choice import engine_maker
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, first_line
from ipufit.partition.request import Parallel
from ipufit.tracing.validate import refuse_unready
from ipufit.training import fit, makers_of_lightning_models, on_batch
from ipufit.training.compile import CompileConfig, build_session
from ipufit.training.fit_data import FitRequest, InferenceRequest
from ipufit.training.inspection import InspectionMixin
from ipufit.training.session import Session
from ipufit.utils.error_collector import ErrorCollector, one_of
from ipufit.utils.names import hinting, with_hints

if TYPE_CHECKING:
    from ipufit.analysis.tuner import BatchSize, LearningRates
    from ipufit.planner.partition_plan import PartitionPlan

__all__ = ["Model", "StepsModel", "load"]


@with_hints()
class Model(InspectionMixin):
    """Trains, evaluates and applies a torch module as one traced program.

    The module stays the source of truth for the weights: it holds the trained values after ``fit``,
    and current ones whenever a callback looks. A model is a context manager that closes itself.
    docs/quickstart.md shows one at work.

    Args:
        module: any ``torch.nn.Module``.
        engine: "embedded", which runs in plain PyTorch; "ipu", which needs the Poplar SDK;
            "ipu-standin", the same over a PopTorch in plain torch, to try it without an IPU; or a
            callable that makes an engine, such as a class of :class:`ipufit.engines.Engine`. "auto"
            is what the environment variable IPUFIT_ENGINE names; without it, "ipu" where SDK and
            IPU are, else "embedded". See docs/ipu.md.
        device: where to run; the module is moved there. None leaves it where it is.

    Attributes:
        module: the user's module.
        history: of the last ``fit``, also one that was interrupted or failed.
        stop_training: set it to True in a callback to end ``fit`` with the present execution.
        outputs: what the module returned in the last training execution, for each micro-batch that
            ``outputs`` of ``compile`` chooses; filled for callbacks with ``wants_outputs``.
        extras: for hooks of callbacks around an execution, the fields of its batches that forward
            does not take, such as ids: for each micro-batch of this process, by name.

    Raises:
        ConfigurationError: the module or the engine is none, or the device is not there.
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
                    f"Model takes a torch.nn.Module object, got {module!r}. Pass an instance, such "
                    "as ipufit.Model(MyNet())."
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
        """Settings that the module itself says it was made with, for loggers of experiments.

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
        """A model of a LightningModule, as it is: its steps, optimizers, hooks and ``self.log``.

        ``fit`` runs ``training_step`` and ``validation_step``, ``evaluate`` the latter, ``test``
        ``test_step`` and ``predict`` ``predict_step``, each as one recorded program. ``compile`` is
        for options alone: without a call, ``configure_optimizers`` says all. It takes Lightning 2.1
        and newer; see docs/coming-from-lightning.md.

        Args:
            module: of ``lightning.pytorch`` or ``pytorch_lightning``; neither is imported.
            engine: as for :class:`ipufit.Model`.
            device: as for :class:`ipufit.Model`.

        Returns:
            A model with all methods of :class:`ipufit.Model`, of which these differ, and ``test``.
            ``compile(optimizer=None, **options)``;
            ``fit(x=None, y=None, batch_size=None, epochs=1, *, datamodule=None, **options)``, which
            validates if there is validation data; ``evaluate(x=None, y=None, batch_size=None, *,
            datamodule=None, **options)``; ``test(x=None, y=None, *, datamodule=None, **options)``;
            ``predict(x=None, batch_size=None, *, datamodule=None, **options)``. Data may be a
            LightningDataModule, as ``x`` or ``datamodule``; without data, the loaders are those of
            the LightningModule. Its attribute ``lightning`` is the LightningModule, of which
            ``module`` is another face, whose ``forward`` is its steps.

        Raises:
            ConfigurationError: it is none, or does what a recorded program can't, such as manual
                optimization; all of it.
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
        """Choose how to train. The count of updates starts anew.

        Arguments by position have the order of Keras 3.

        docs/optimizers-losses-metrics.md, docs/precision-and-gradients.md, docs/logging-values.md,
        docs/memory.md and docs/speed.md show what the arguments do.

        Args:
            optimizer: a name ("sgd", "adam", "adamw", "rmsprop", "lamb" or any other of
                torch.optim), an optimizer class, a configured torch optimizer over the module's
                parameters (its state is taken over), or a factory that is called with the trainable
                parameters. None makes a model that can only evaluate and predict.
            loss: a name, a module or such a class, or a callable ``(prediction, target)`` that
                returns the mean over a micro-batch or one value per sample, or None when the module
                returns ``(outputs, loss)`` itself. Several losses are a dict by name of the
                module's outputs, or a list by position. A :class:`ipufit.TrainStep`, or a list of
                them, is a step of one's own: which loss moves what, in which order, how often.
            loss_weights: what each of several losses is multiplied with, in the form of the losses;
                1 by default.
            metrics: names, callables ``(prediction, target)`` or torchmetrics objects; one, a list,
                or a dict by name; with several losses a dict or list by output. Parameters of
                losses and metrics such as ``y_true, y_pred`` say another order.
            weighted_metrics: metrics that are weighted with the sample weights, in the form of
                ``metrics``.
            run_eagerly: run the module itself instead of a recorded program: the same numbers,
                slower, open to a debugger, and for whatever a loop written by hand trains.
            inputs: where batches are dicts, the fields that forward gets: the name of one, which it
                gets by position, a list of names that are those of its parameters, or a dict from
                parameters to names. None are those whose names forward takes. What is neither input
                nor target stays beside the program: for metrics that ask for it by the name of a
                parameter, and for callbacks, as ``extras``.
            targets: where batches are dicts, the field that the loss is held against, or a list of
                names for a dict of targets. None is the one that forward leaves.
            jit: how a recorded program runs: "graph", as it was recorded, with the bits of
                run_eagerly; "kernels", with other kernels of torch's where these are faster on this
                machine, equal up to the order of summation; "inductor", whole updates compiled on
                the CPU, for which the first update waits, equal likewise; "cudagraph", whole
                executions as captured CUDA graphs. "auto" captures those on a GPU, chooses by
                measurement on a CPU, runs a module itself, with a warning, that can't be recorded,
                and says in ``explain`` and ``History.params["jit"]`` what it chose. Any other name,
                such as "aot_eager" or "openxla", or a function is a backend of torch.compile, to
                which recorded graphs are handed; what it makes of one must compute the same, up to
                the order of summation.
            lr_scheduler: hyper-parameters that change from update to update: "cosine", a scheduler
                of torch's, and more; see :func:`ipufit.optim.schedules.resolve_schedule`.
            lr_scheduler_interval: "update" or "epoch": after what the schedule moves on.
            reduction: how samples, sample weights and micro-batches count in a gradient; see
                :class:`ipufit.Reduction`. By default all samples alike, by the mean.
            clip: bound on gradients; see :class:`ipufit.Clip`.
            ema: keep an exponential moving average of the trained weights, which ``fit`` makes
                the weights at its end; see :class:`ipufit.EMA`.
            precision: such as "mixed_float16", or with a loss scale or a dtype of accumulation; see
                :class:`ipufit.Precision`, of which a name is the short form.
            outputs: which outputs of a training execution come back, and so what metrics see:
                "all", "final", "sum", or ``ipufit.Outputs("every_n", 4)``; see
                :class:`ipufit.Outputs`. None is that of ``config`` or ``poptorch``, else "all".
            parallel: stages or layers on each IPU; see :class:`ipufit.Parallel`, of which a plan of
                :meth:`plan` is the short form.
            memory: what is cut, computed again, offloaded or shared out between processes to need
                less memory; see :class:`ipufit.Memory`.
            detect_nan: look at gradients and weights in every update, not at losses alone. If one
                is not finite, that update is run again operator by operator, and
                :class:`ipufit.errors.NonFiniteLossError` names the module, the operator, the line
                and the samples where it began. One process and the embedded engine only.
            max_recordings: shapes of batches that one program may record, or compile for an IPU;
                one more is an error that lists them. Recording takes a moment for each shape, and
                memory; run eagerly nothing is recorded. See docs/data.md.
            poptorch: ``poptorch.Options`` for training, or a pair ``(training_options,
                inference_options)``, of which the second are for validation, ``evaluate`` and
                ``predict``; copies are used. What they say of replicas, device iterations,
                accumulation and seed is fixed for later calls; an argument that disagrees is
                refused. Off IPUs, what was set and what becomes of it there is printed.
            config: an :class:`ipufit.IPUConfig`, or what its ``from_pretrained`` takes. It fixes
                IPUs, device iterations, accumulation and seed of later calls; an argument that
                disagrees is refused. What each parameter does here is printed. See
                docs/ipu-config.md.

        Raises:
            UnknownNameError: an unknown name; with the nearest known one.
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
        """The torch optimizer that ``compile`` made or was given, its state up to date, or None.

        Under ``Memory(shard="optimizer")`` it has no state in several processes: see
        :meth:`gather_optimizer`.
        """
        return self._compiled("optimizer").optimizer

    def gather_optimizer(self) -> Optional[torch.optim.Optimizer]:
        """Return the optimizer with its whole state, also where ``Memory.shard`` has divided it.

        :attr:`optimizer` has settings alone there. Call it in all processes at the same time,
        between fits or from a callback. The next execution leaves settings alone again; before it,
        at the end of an epoch or between fits, the state may be changed, in all processes alike.
        """
        return self._compiled("gather_optimizer").gather_optimizer()

    def gather_weights(self) -> nn.Module:
        """The module, with its present weights where ``Memory(shard="weights")`` has divided them.

        During ``fit`` its weights are else those of the end of the last epoch. Call it in all
        processes at the same time, from a callback. Elsewhere the module has them anyway.
        """
        self._compiled("gather_weights").gather_weights()
        return self.module

    def swap_ema_weights(self) -> None:
        """Exchange the trained weights and their moving averages; called again, back.

        For callbacks during ``fit``, such as
        :class:`ipufit.callbacks.SwapEMAWeights`. Training goes on with the weights only.

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
        """Train. See docs/data.md for what ``x`` may be, and docs/plan.md for the numbers of a run.

        Arguments by position have the order of Keras.

        Args:
            x: a tensor, a NumPy array (memory-mapped ones are read a batch at a time), a list of
                numbers, a DataFrame or Series of pandas or polars, a sparse matrix of SciPy, or a
                dict, tuple or list of such, with one row per sample; a map-style or iterable
                Dataset; a ``keras.utils.PyDataset``; a DataLoader; or any iterable of batches
                ``(inputs, target)`` or ``(inputs, target, sample_weight)``. A loader's batch size
                is the micro-batch; its sampler, collate_fn, workers and generator are used as they
                are.
            y: targets beside tensors and arrays, in any structure, one row per sample.
            batch_size: of tensors, arrays and datasets: the micro-batch. None is 32.
            epochs: how many, or a range of their indices, such as range(3, 10) for those that
                follow the first three.
            verbose: 0 silent, 1 a progress bar, 2 a line per epoch, "rich" a bar by the package of
                that name (``pip install ipufit[rich]``); "auto" is 1 in a terminal or a notebook,
                else 2.
            callbacks: one, a list, or None: told what happens; see
                :class:`ipufit.callbacks.Callback`. With :class:`ipufit.Report` a run writes down
                where its time and memory go.
            validation_split: the last fraction of tensors, arrays or a map-style dataset is held
                out, before shuffling.
            validation_data: evaluated after every epoch; it never disturbs training. ``(x, y)`` or
                ``(x, y, sample_weight)`` of tensors and arrays, as a tuple or list, or any other
                form of ``x``; or an :class:`ipufit.Validation`, which also says how often and how
                much.
            shuffle: tensors, arrays, map-style datasets and the batches of a PyDataset, anew in
                every epoch, in an order that depends on seed and epoch alone. None is True for
                these; a loader has its own order.
            class_weight: weight of the samples by class index; other classes weigh 1. The target
                holds class indices, or rows of probabilities.
            sample_weight: how much each sample counts, beside tensors and arrays; shape (samples,)
                or more dimensions. Integers and bools become floating point.
            steps_per_epoch: weight updates of an epoch. The next epoch goes on with the data where
                this one ends; data that runs out is read anew.
            ipus: total number of IPUs, of each process where there are several, a multiple of those
                of a replica. None is that of ``compile(config=...)``, else one replica.
            device_iterations: weight updates per execution. None is that of
                ``compile(config=...)``, else 1.
            gradient_accumulation: micro-batches that a replica sums before an update; None as for
                ``device_iterations``.
            checkpoint: folder to write everything down in, so that the run can go on exactly; or an
                :class:`ipufit.Checkpoint`, which also says how often, and from where to go on.
            loading: how much of the data is read, and how far ahead; None reads all.
            seed: of all random numbers: dropout and the like, the order of samples, and what a
                loader draws from torch's generator in this process. None is that of ``config`` or
                ``poptorch`` of ``compile``, else one drawn from that generator.

        Returns:
            The history; it is in ``self.history`` too, also when this call does not return.

        Raises:
            NotCompiledError: before ``compile``.
            PlanError: the batch algebra does not fit; with all faults.
            ConfigurationError: arguments that can't work, or not together; all of them.
                ``LossError``, ``MetricError`` and ``OptimizerError`` are kinds of it, for a loss, a
                metric or an optimizer that does not fit module and data.
            DataError: data that can't be read or fed; with batch and sample where known.
            CaptureError: the module can't be recorded; with file and line.
            NonFiniteLossError: NaN or infinity; the state is that before the update it names.
            CheckpointError: a checkpoint that can't be written or read, or is of another run.
        """
        later = "Start the second call after the first has returned."
        session = self._trainable("fit", later)
        data = DataArguments(
            "training data", x, y, sample_weight, class_weight, batch_size, shuffle
        )
        request = FitRequest(
            data,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            steps_per_epoch=steps_per_epoch,
            ipus=ipus,
            device_iterations=device_iterations,
            gradient_accumulation=gradient_accumulation,
            checkpoint=checkpoint,
            loading=loading,
            seed=seed,
        )
        return fit.fit(self, session, request)

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
        """Loss and metrics, exact means over all samples. The module is in eval mode meanwhile.

        A model that was not compiled takes ``loss`` and ``metrics`` here. Each such call records
        the module anew; for several, call ``compile(loss=...)`` first.

        Args:
            x: as for ``fit``; never shuffled by ipufit.
            y: as for ``fit``.
            batch_size: as for ``fit``.
            verbose: 0 silent, 1 a progress bar, 2 one line; the rest as for ``fit``.
            sample_weight: as for ``fit``.
            steps: device iterations to read at most, from the start; None for all.
            callbacks: get the ``on_test_`` hooks.
            return_dict: False for Keras' other form: the loss, or with metrics a list that begins
                with it.
            loss: as for ``compile``, of a model that was not compiled.
            metrics: as for ``compile``, of a model that was not compiled.
            prefetch: as for :class:`ipufit.Loading`.
            ipus: total number of IPUs. None is that of ``compile(config=...)``, else one replica.
            device_iterations: forward passes per execution; None is that of the config, else 1.
            seed: of random numbers drawn in eval mode, if the module draws any; None is 0, or what
                ``compile`` has fixed.

        Returns:
            "loss" and one value per metric and logged name.

        Raises:
            NotCompiledError: before ``compile``, with neither ``loss`` nor ``metrics``.
            PlanError: the batch algebra does not fit; with all faults.
            ConfigurationError: arguments that can't work, or not together; all of them.
            DataError: data that can't be read or fed.
        """
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
        request = InferenceRequest(
            data, steps, prefetch, ipus, device_iterations, callbacks, seed, verbose
        )
        values = fit.evaluate(self, session, request, faults)
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
        """The module's outputs for all samples, in the data's order; without ``compile`` too.

        Args:
            x: as for ``fit``: inputs as a tensor, an array or a dict of such, or a tuple or list of
                such where ``forward`` takes several; or batches of inputs, of ``(inputs, target)``
                or of ``(inputs, target, sample_weight)``, of which all but the inputs is left
                aside.
            batch_size: as for ``fit``.
            verbose: as for ``evaluate``.
            steps: device iterations to read at most, from the start; None for all.
            callbacks: get the ``on_predict_`` hooks.
            prefetch: as for :class:`ipufit.Loading`.
            ipus: total number of IPUs. None is that of ``compile(config=...)``, else one replica.
            device_iterations: forward passes per execution; None is that of the config, else 1.
            padding_value: outputs of several shapes are padded with it, at the end of every
                dimension, to one tensor; None makes them a list with a tensor for each sample.
            seed: of random numbers drawn in eval mode, if the module draws any; None is 0, or what
                ``compile`` has fixed.

        Returns:
            The structure that the module returns, each tensor with one row per sample; a list of
            rows stands for a tensor whose rows have several shapes.

        Raises:
            PlanError: the batch algebra does not fit; with all faults.
            ConfigurationError: arguments that can't work, or not together; all of them.
            DataError: data that can't be read or fed, or an output without a row per sample.
        """
        values = (steps, prefetch, ipus, device_iterations, callbacks, seed, verbose, padding_value)
        return fit.predict(self, *self._prediction(x, batch_size, *values))

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
        """Yield the results of ``predict`` piece by piece: memory holds those of one execution.

        See docs/finding-settings.md.

        Args:
            x: as for ``predict``.
            batch_size: as for ``fit``.
            verbose: as for ``evaluate``.
            steps: device iterations to read at most, from the start; None for all.
            callbacks: get the ``on_predict_`` hooks; ``on_predict_end`` after the last piece.
            prefetch: as for :class:`ipufit.Loading`.
            ipus: total number of IPUs. None is that of ``compile(config=...)``, else one replica.
            device_iterations: forward passes per execution, and so per piece; None is that of the
                config, else 1.
            padding_value: as for ``predict``; each piece is padded by itself.
            seed: of random numbers drawn in eval mode, if the module draws any; None is 0, or what
                ``compile`` has fixed.

        Returns:
            An iterator over the outputs of each execution, in order; together they have one row per
            sample. Arguments are checked now, batches as they come.

        Raises:
            PlanError: the batch algebra does not fit; with all faults.
            ConfigurationError: as for ``predict``, and while reading, if the weights have changed,
                or the model was compiled or closed, in between.
            DataError: data that can't be read or fed, or an output without a row per sample.
        """
        values = (steps, prefetch, ipus, device_iterations, callbacks, seed, verbose, padding_value)
        return fit.stream(self, *self._prediction(x, batch_size, *values))

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Optional[Mapping[int, float]] = None,
        return_dict: bool = True,
    ) -> Union[float, List[float], Dict[str, float]]:
        """One weight update on one batch, on one replica.

        The count of updates, the schedule, moving averages and the loss scale go on from call to
        call; dropout draws other numbers each time. ``fit`` is faster: it takes the weights over
        once. See docs/finding-settings.md.

        Args:
            x: inputs of one batch: tensors, arrays, or a structure of them.
            y: targets.
            sample_weight: how much each sample counts.
            class_weight: how much samples count, by class index.
            return_dict: False for Keras' other form: the loss, or with metrics a list that begins
                with it.

        Returns:
            "loss" and one value per metric and logged name, of the batch before the update.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: inside ``fit``, or no optimizer.
            DataError: a batch that can't be fed.
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
        """Loss and metrics of one batch.

        Args:
            x: inputs of one batch: tensors, arrays, or a structure of them.
            y: targets.
            sample_weight: how much each sample counts.
            return_dict: as for :meth:`train_on_batch`.

        Returns:
            "loss" and one value per metric and logged name, of the batch with the present weights.

        Raises:
            NotCompiledError: before ``compile``.
            DataError: a batch that can't be fed.
        """
        one_of("return_dict", return_dict, (True, False))
        session = self._compiled("test_on_batch")
        values = on_batch.test_on_batch(session, on_batch.as_batch(x, y, sample_weight))
        return on_batch.as_keras_returns(values, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """The module's outputs for one batch.

        Args:
            x: inputs of one batch: tensors, arrays, or a structure of them.

        Returns:
            The structure that the module returns, each tensor with one row per sample.

        Raises:
            DataError: a batch that can't be fed.
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
        """Train for a moment with a learning rate that grows from update to update.

        Weights, buffers, optimizer state, counters and random number generators are put back bit
        for bit. Rates of several parameter groups keep their ratios. See docs/finding-settings.md.

        Args:
            x: data, as for ``fit``; read anew as often as needed, so no iterator.
            y: as for ``fit``.
            batch_size: as for ``fit``.
            min_lr: rate of the first update.
            max_lr: rate of the last one.
            updates: how many; fewer happen when the loss diverges, to four times its best.
            ipus: as for ``fit``.
            gradient_accumulation: as for ``fit``.
            seed: as for ``fit``.

        Returns:
            Rates and losses, a suggestion and a plot.

        Raises:
            NotCompiledError: before ``compile``.
            ConfigurationError: arguments that can't work, or inside ``fit``.
            DataError: data that can't be read or fed, or that can be read only once.
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
        """Look for the largest micro-batch that fits into memory, at constant samples per update.

        One update is run with each size that divides the effective batch, from ``start`` on, twice
        as large each time; ``gradient_accumulation`` makes up for the rest. All is put back as it
        was. On a CPU memory seldom runs out, so look at the rates in ``tried`` too. See
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
            ConfigurationError: arguments that can't work, inside ``fit``, or not even the smallest
                one fits.
            DataError: data that can't be read or fed.
        """
        from ipufit.analysis import tuner

        trial = tuner.Trial(self._trainable("find_batch_size"), self._make_engine)
        return tuner.find_batch_size(trial, x, y, effective_batch_size, start, ipus, seed)

    def save_weights(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write the module's weights to one file; from a callback too.

        It holds ``module.state_dict()`` in the format of safetensors:
        ``module.load_state_dict(safetensors.torch.load_file(path))`` reads it, without ipufit. The
        file appears under its name only when it is complete, so an interrupted write leaves the one
        that was there.

        Args:
            path: ends with ".safetensors"; its folder exists.

        Raises:
            ConfigurationError: the path can't be written, or the state is not all tensors.
        """
        self._write_weights(path, False)

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write the module's weights to one file that also says what they are of.

        The same file as that of :meth:`save_weights`, with the module's class, the updates made
        and the versions in its metadata. :func:`ipufit.load` makes a model of it.

        Args:
            path: ends with ".safetensors"; its folder exists.

        Raises:
            ConfigurationError: the path can't be written, or the state is not all tensors.
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
        """Read a file of weights into the module's tensors, in place; from a callback too.

        Everything is compared before anything is changed.

        Args:
            path: of a safetensors file, or of one ending with ".pt", ".pth" or ".bin" that
                ``torch.save(module.state_dict(), path)`` wrote: without unpickling anything but
                tensors, from torch 2.6 on.
            strict: every name and every dtype must agree; a floating-point dtype may become a wider
                one. False leaves out what only one side has, and converts dtypes.

        Raises:
            ConfigurationError: the file can't be read, or does not fit; with all differences.
        """
        from ipufit.core.weights_file import load_weights

        load_weights(self.module, path, strict)

    def close(self) -> None:
        """Let go of recorded programs and of the device; ``compile`` starts anew. Safe twice."""
        self._retire(None)

    def _retire(self, successor: Optional[Session]) -> None:
        """Another session takes the place of the present one."""
        for session in (self._session, self._predictor):
            if session is not None:
                session.retire()
        self._session, self._predictor = successor, None

    def _compiled(self, name: str) -> Session:
        if self._session is not None or not name.startswith("predict"):
            return super()._compiled(name)
        # Outputs need neither optimizer nor loss, which only compile can tell.
        return self._predictor or self._compile_to_infer("mse", None)

    def _prediction(
        self, x: object, batch_size: object, *values: Any
    ) -> Tuple[Session, InferenceRequest, ErrorCollector]:
        """The arguments of a prediction, and the session that predicts."""
        faults, has_inputs = ErrorCollector(of_call=True), are_inputs(self.module, x)
        data = DataArguments("prediction data", x, batch_size=batch_size, are_inputs=has_inputs)
        return self._compiled("predict"), InferenceRequest(data, *values), faults

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


class StepsModel(Model, abc.ABC):
    """Model of a LightningModule, as :meth:`ipufit.Model.from_lightning` makes it.

    What its methods take beyond the data, a batch size and epochs goes by name alone.

    Args:
        module: as for :meth:`ipufit.Model.from_lightning`, which checks it.
        engine: as for :class:`ipufit.Model`.
        device: as for :class:`ipufit.Model`.

    Attributes:
        lightning: the LightningModule; ``module`` is another face of it, whose forward is its
            steps.
    """

    lightning: nn.Module

    @abc.abstractmethod
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

    @abc.abstractmethod
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

    @abc.abstractmethod
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

    @abc.abstractmethod
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
    """A model of the module, with the weights of a file.

    A torch module is code, which no file should bring along; so it is made by whoever loads it.

    Args:
        path: of a file of :meth:`ipufit.Model.save` or ``save_weights``, of any safetensors file
            with these names, or of one that ``torch.save(module.state_dict(), path)`` wrote.
        module: like the one that was saved; its weights become those of the file.
        engine: as for :class:`ipufit.Model`.
        device: as for :class:`ipufit.Model`.

    Raises:
        ConfigurationError: the file can't be read, or does not fit the module, which is as before.
    """
    model = Model(module, engine, device)
    model.load_weights(path)
    return model
