"""The accelerator "ipu", IPUStrategy, by which batches become executions, and a Trainer."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ipufit.core import EngineName
from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import INFERENCE, TRAINING, role_of
from ipufit.core.outputs import join_rows
from ipufit.core.train_config import Clip
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, unfit
from ipufit.lightning.programs import (
    Done,
    ExecutionBatches,
    Executions,
    ExecutionSize,
    Programs,
    TrainingReport,
    part,
    words_of_strategy,
)
from ipufit.lightning_module.inspection import refuse_data_hooks
from ipufit.lightning_module.model import LightningModel
from ipufit.lightning_module.optimizers import configure_optimizer
from ipufit.lightning_module.steps import acting_as
from ipufit.processes import current
from ipufit.report.settings import Report, refuse_report
from ipufit.utils.error_collector import at_least, folder_of, one_of
from ipufit.utils.poptorch_sdk import sdk_kind

# Names of the strategy's for the arguments of compile.
_OPTIONS = {TRAINING: "training_opts", INFERENCE: "inference_opts"}
_PRECISIONS = {"32-true": None, "16-mixed": "16-mixed", "bf16-mixed": "bf16-mixed"}


class _Facts:
    """The Trainer, with the number of updates where it would tell that of executions."""

    def __init__(self, trainer: Any, updates: Callable[[], int]) -> None:
        self._trainer = trainer
        self._updates = updates

    @property
    def estimated_stepping_batches(self) -> int:
        return self._updates()

    def __getattr__(self, name: str) -> object:
        return getattr(self._trainer, name)


class Replicas(List[torch.device]):
    """Device list of a Trainer: one device, with the number of replicas behind it."""

    def __init__(self, count: int) -> None:
        super().__init__([torch.device("cpu")])
        self.replicas = count


class IPUStrategy(part("strategies").SingleDeviceStrategy):  # type: ignore[misc]
    """Trains as ``Trainer(accelerator="ipu", strategy=IPUStrategy(device_iterations=32))`` did.

    A batch of the Trainer's is one execution: its hooks, callbacks, limits and ``global_step``
    count executions; the schedule moves on with every update inside.

    Args:
        accelerator: as for other strategies.
        device_iterations: weight updates per execution.
        autoreport: whether a report of training is written: on IPUs PopVision's profile, else that
            of :class:`ipufit.Report`. What the folder has of an earlier run is written over.
        autoreport_dir: its folder, which asks for it too; None is "autoreport" in the present one.
        checkpoint_io: as for other strategies.
        precision_plugin: as for other strategies.
        training_opts: ``poptorch.Options``, as ``compile(poptorch=)`` takes them; a copy is
            used. Replicas and accumulation steps are those of the Trainer where it has more than
            one, with a warning where the options have other ones.
        inference_opts: the same for validation, test and predict.
        engine: as for :class:`ipufit.Model`.

    Raises:
        ConfigurationError: an argument that can't be honoured.
    """

    strategy_name = "ipu_strategy"
    # From when a Trainer connects a module.
    _translated: LightningModel
    _programs: Programs

    def __init__(
        self,
        accelerator: object = None,
        device_iterations: int = 1,
        autoreport: bool = False,
        autoreport_dir: Optional[str] = None,
        *,
        checkpoint_io: object = None,
        precision_plugin: object = None,
        training_opts: object = None,
        inference_opts: object = None,
        engine: Union[EngineName, Callable[[], Engine]] = "auto",
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        # A folder alone asks for a report too, as on Lightning's pages.
        one_of("autoreport", autoreport, (True, False))
        self._report_folder: Optional[str] = None
        if autoreport or autoreport_dir is not None:
            # PopVision's own default is the present folder.
            folder = "autoreport" if autoreport_dir is None else autoreport_dir
            self._report_folder = os.path.abspath(folder_of("autoreport_dir", folder))
        self._in_validation = contextlib.ExitStack()
        # A Trainer puts here what the accelerator makes of its devices.
        self.parallel_devices: Sequence[torch.device] = ()
        self._device_iterations = at_least("device_iterations", device_iterations, 1)
        self._opts: Dict[str, Any] = {TRAINING: training_opts, INFERENCE: inference_opts}
        for name, options in zip(_OPTIONS.values(), self._opts.values()):
            if options is not None and sdk_kind(options, ("Options",)) is None:
                needed = "poptorch.Options or None"
                raise unfit(name, needed, options, "Make them with poptorch.Options().")
        self._options: Dict[str, object] = {}
        self._works: Dict[str, ExecutionSize] = {}
        self._engine = engine
        self._trainer: Any = None
        self._accumulation = 1

    # What a Trainer sets up

    def connect(self, model: nn.Module) -> None:
        """Another run begins with this module."""
        super().connect(model)
        self._translated = LightningModel(model, self._engine, by_trainer=True)
        self._programs = Programs(self._translated, self._report_folder)

    def setup(self, trainer: Any) -> None:
        """Compile the LightningModule for this run of the Trainer.

        Raises:
            ConfigurationError: Trainer, module or data ask for what can't be honoured.
        """
        self._trainer, self._accumulation = trainer, trainer.accumulate_grad_batches
        if current().is_distributed:
            raise ConfigurationError(
                f"IPUStrategy trains in one process, but this is one of {current().num_processes}. "
                "Use ipufit.Model.from_lightning, which trains in several."
            )
        if trainer.precision not in _PRECISIONS:
            needed = f"one of {', '.join(map(repr, _PRECISIONS))} with IPUStrategy"
            advice = "Convert the module itself to another dtype."
            raise unfit("precision", needed, trainer.precision, advice)
        refuse_data_hooks(vars(trainer).get("datamodule"))
        # A batch is a whole execution, which accumulates inside.
        trainer.accumulate_grad_batches = 1
        self._merge_options()
        super().setup(trainer)
        if trainer.state.fn != "fit":
            with words_of_strategy():
                self._translated.compile_to_infer(
                    precision=_PRECISIONS[trainer.precision], poptorch=self._pair
                )
            return
        session = self._translated.session
        if self._report_folder is None or session.engine.takes_options:
            return
        report = Report(self._report_folder, overwrite=True)
        refuse_report(report, resumes=False)
        updates = None
        with contextlib.suppress(ConfigurationError):
            updates = self._updates()
        self._programs.report = TrainingReport(session, report, trainer.max_epochs, updates)

    def setup_precision_plugin(self) -> None:
        """Nothing: the program computes in what compile was told."""

    def setup_optimizers(self, trainer: Any) -> None:
        """One optimizer, and a schedule that the program steps with every update."""
        facts = _Facts(trainer, self._updates)
        optimizer, schedule = configure_optimizer(self.lightning_module, facts)
        if optimizer is None:
            raise ConfigurationError(
                "configure_optimizers must return an optimizer, got none. Return one."
            )
        clip, how = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        bound = None
        if clip:
            bound = Clip(value=clip) if how == "value" else Clip(global_norm=clip)
        self.optimizers = [optimizer]
        self.lr_scheduler_configs: List[object] = []
        with words_of_strategy():
            self._translated.compile(
                optimizer,
                lr_scheduler=schedule,
                precision=_PRECISIONS[trainer.precision],
                clip=bound,
                poptorch=self._pair,
            )

    @property
    def _pair(self) -> Tuple[object, object]:
        """The options for training and for inference, as ``compile`` takes them."""
        return self._options.get(TRAINING), self._options.get(INFERENCE)

    def _updates(self) -> int:
        """Weight updates of the whole training."""
        trainer = self._trainer
        trainer.fit_loop.setup_data()
        loader = trainer.train_dataloader
        is_whole = isinstance(loader, Executions) and trainer.num_training_batches == len(loader)
        if not is_whole or trainer.max_epochs < 1:
            raise ConfigurationError(
                "estimated_stepping_batches is known for a number of whole epochs only. Leave "
                "limit_train_batches out, and pass max_epochs."
            )
        work = self._work(Mode.TRAIN)
        per_update = work.replicas * work.accumulation
        return int(-(-len(loader.loader) // per_update) * trainer.max_epochs)

    def _merge_options(self) -> None:
        """Settle what an execution does in either mode, by Trainer, strategy and options.

        Raises:
            ConfigurationError: strategy and options disagree.
        """
        devices = self.parallel_devices
        replicas = devices.replicas if isinstance(devices, Replicas) else 1
        self._options = {}
        for role, options in self._opts.items():
            accumulation = self._accumulation if role == TRAINING else 1
            work = ExecutionSize(replicas, self._device_iterations, accumulation)
            if options is not None:
                options = options.clone()
                work = _merge(work, options, _OPTIONS[role])
            self._options[role], self._works[role] = options, work

    def _work(self, mode: Mode) -> ExecutionSize:
        """Return the work of an execution in a mode."""
        return self._works[role_of(mode)]

    def process_dataloader(self, dataloader: object) -> Executions:
        """Wrap a loader so that it yields the batches of whole executions."""
        trains = self._trainer.state.stage == "train"
        mode = Mode.TRAIN if trains else Mode.EVALUATE
        count = self._work(mode).micro_batches
        if not trains:
            return Executions(dataloader, count)
        return Executions(dataloader, count, lambda: self._programs.clock)

    def batch_to_device(
        self, batch: object, device: object = None, dataloader_idx: int = 0
    ) -> object:
        """Return the batch as it is: the engine copies it to the device."""
        return batch

    @property
    def handles_gradient_accumulation(self) -> bool:
        """It is part of the program."""
        return True

    # Training

    def training_step(self, batch: ExecutionBatches, *_: object) -> Tensor:
        """One execution; the mean loss of its samples."""
        (done,) = self._programs.run(batch, Mode.TRAIN, self._work(Mode.TRAIN), self._trainer)
        self._log(done, "train")
        return done.loss

    def _log(self, done: Done, role: str) -> None:
        """Hand on what the step has logged, as that of one batch with all samples."""
        notes = self._translated.notes(role)
        # Lightning computes and resets metric objects itself.
        values: Dict[str, object] = {**done.logged, **self._translated.logged_metrics(role)}
        for name, value in values.items():
            if name in notes:  # else it says that there is no loss
                options = notes[name]
                self.lightning_module.log(name, value, batch_size=done.samples, **options)

    def backward(self, closure_loss: Tensor, optimizer: object, *_: object, **__: object) -> Tensor:
        """Nothing: it is part of the program."""
        return closure_loss

    def optimizer_step(
        self, optimizer: object, closure: Callable[[], object], model: object = None, **_: object
    ) -> object:
        """The execution, of which updates are a part."""
        return closure()

    # Inference

    def validation_step(self, batch: ExecutionBatches, *_: object) -> None:
        """Run one execution of the validation."""
        self._inferred(batch, "validation", Mode.EVALUATE)

    def test_step(self, batch: ExecutionBatches, *_: object) -> None:
        """Run one execution of the test."""
        self._inferred(batch, "test", Mode.EVALUATE)

    def predict_step(self, batch: ExecutionBatches, *_: object) -> object:
        """The outputs of one execution, joined."""
        return join_rows(self._inferred(batch, "predict", Mode.PREDICT))

    def _inferred(self, batch: ExecutionBatches, role: str, mode: Mode) -> List[object]:
        outputs: List[object] = []
        with acting_as(self._translated.module, role):
            for done in self._programs.run(batch, mode, self._work(mode), self._trainer):
                outputs += done.outputs
                self._log(done, role)
        return outputs

    def on_validation_start(self) -> None:
        """Count the time from here on as validation."""
        self._programs.begin_validation()
        self._in_validation.enter_context(self._programs.clock.during("validation"))

    def on_validation_end(self) -> None:
        """The device is for training again."""
        self._in_validation.close()
        self._programs.finish(Mode.EVALUATE)

    def on_test_end(self) -> None:
        """Let go of the program of the test."""
        self._programs.finish(Mode.EVALUATE)

    def on_predict_end(self) -> None:
        """Let go of the program of the prediction."""
        self._programs.finish(Mode.PREDICT)

    def on_train_end(self) -> None:
        """The module owns its weights again."""
        self._programs.end_training(self._trainer.callback_metrics)

    def teardown(self) -> None:
        """Let go of everything; also after an error."""
        self._in_validation.close()
        programs: Optional[Programs] = vars(self).get("_programs")
        if programs is not None:  # else the module was refused
            programs.end_report(sys.exc_info()[1])
            programs.finish(*Mode)
        if self._trainer is not None:
            self._trainer.accumulate_grad_batches = self._accumulation
        super().teardown()

    # Checkpoints

    def optimizer_state(self, optimizer: object) -> Dict[str, object]:
        """Return the optimizer's state after the device has written it back."""
        self._programs.publish()
        state: Dict[str, object] = super().optimizer_state(optimizer)
        return state

    def load_checkpoint(
        self, checkpoint_path: object, *args: object, **options: object
    ) -> Dict[str, object]:
        """Load the weights of a checkpoint for an evaluation.

        Raises:
            ConfigurationError: training would go on without the schedule's place.
        """
        if self._trainer is None or self._trainer.state.fn == "fit":
            raise ConfigurationError(
                "IPUStrategy can't resume from a checkpoint of the Trainer, because it does not "
                "contain the schedule. Load its weights into the module, or train with "
                "ipufit.Model.from_lightning and fit(checkpoint=...)."
            )
        checkpoint: Dict[str, object] = super().load_checkpoint(checkpoint_path, *args, **options)
        return checkpoint

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy with Lightning by its name."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)


def _merge(work: ExecutionSize, options: Any, name: str) -> ExecutionSize:
    """Bring options into line with the Trainer, which counts unless it has a default of 1.

    Args:
        work: as Trainer and strategy have it.
        options: are changed.
        name: of the options.

    Returns:
        What an execution does.

    Raises:
        ConfigurationError: the strategy has other device iterations than the options.
    """
    replicas, iterations, accumulation = work
    if iterations not in (1, options.device_iterations) and options.device_iterations != 1:
        raise ConfigurationError(
            f"device_iterations is set twice: IPUStrategy has {iterations} and {name} have "
            f"{options.device_iterations}. Leave one out."
        )
    training = options.Training
    copies, sums = options.replication_factor, training.gradient_accumulation
    for setter, present, wanted, argument in (
        ("replicationFactor", copies, replicas, "devices"),
        ("Training.gradientAccumulation", sums, accumulation, "accumulate_grad_batches"),
    ):
        if wanted > 1 and present not in (1, wanted):
            part("utilities").rank_zero_warn(
                f"{name}.{setter} is {present}, but the Trainer has {argument}={wanted}, which "
                "takes precedence. Leave one out."
            )
    if name == _OPTIONS[INFERENCE] and sums != 1:
        part("utilities").rank_zero_warn(
            f"{name}.Training.gradientAccumulation is {sums}, but nothing is accumulated in "
            "inference, where it counts as 1. Leave it out there."
        )
        sums = 1
    work = ExecutionSize(
        copies if replicas == 1 else replicas,
        options.device_iterations if iterations == 1 else iterations,
        sums if accumulation == 1 else accumulation,
    )
    options.replicationFactor(work.replicas).deviceIterations(work.device_iterations)
    training.gradientAccumulation(work.accumulation)
    return work


class IPUAccelerator(part("accelerators").Accelerator):  # type: ignore[misc]
    """Accelerator "ipu", for which ``devices=8`` means eight replicas of the model.

    They run on the engine of the strategy, and so also where there is no IPU.
    """

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: the engine finds its devices itself."""

    def setup(self, trainer: Any) -> None:
        """Make sure that the strategy is that of ipufit.

        Raises:
            ConfigurationError: another strategy would train on the host instead.
        """
        if not isinstance(trainer.strategy, IPUStrategy):
            raise ConfigurationError(
                "accelerator='ipu' needs ipufit's strategy, got "
                f"{type(trainer.strategy).__name__}. Pass strategy=ipufit.lightning.IPUStrategy(), "
                "or make the Trainer with ipufit.lightning.Trainer, which has it."
            )

    def teardown(self) -> None:
        """Do nothing: there is nothing to free."""

    def get_device_stats(self, device: object) -> Dict[str, object]:
        """Return an empty dict: an IPU has no statistics to monitor."""
        return {}

    @staticmethod
    def parse_devices(devices: object) -> int:
        """Convert ``devices`` of a Trainer to a number of replicas."""
        if type(devices) is str and devices.isdigit():
            devices = int(devices)
        if type(devices) is not int or devices < 1:
            needed = "a number of replicas with accelerator='ipu'"
            raise unfit("devices", needed, devices, "Pass for example devices=4.")
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> Replicas:
        """Return one device for the Trainer, which must start no further processes."""
        return Replicas(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return 1, the default number of replicas."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return True: without an IPU the embedded engine runs."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name by which a Trainer takes it."""
        return "ipu"


class Trainer(part("").Trainer):  # type: ignore[misc]
    """Lightning's Trainer, for which ``accelerator="ipu"`` means :class:`IPUStrategy` too.

    Lightning chooses the strategy of an accelerator from a list of its own, to which nothing can be
    added.

    >>> from ipufit.lightning import Trainer
    >>> trainer = Trainer(accelerator="ipu", devices=8, logger=False, enable_checkpointing=False)
    >>> type(trainer.strategy).__name__
    'IPUStrategy'

    Args:
        options: the arguments of Lightning's Trainer, by name.
    """

    def __init__(self, **options: Any) -> None:
        accelerator = options.get("accelerator")
        is_ours = accelerator == IPUAccelerator.name() or isinstance(accelerator, IPUAccelerator)
        if is_ours and options.get("strategy", "auto") == "auto":
            options["strategy"] = IPUStrategy()
        super().__init__(**options)


_strategies: Any = part("strategies").StrategyRegistry
if IPUStrategy.strategy_name not in _strategies:
    IPUStrategy.register_strategies(_strategies)
_accelerators: Any = part("accelerators").AcceleratorRegistry
if IPUAccelerator.name() not in _accelerators:
    _accelerators.register("ipu", IPUAccelerator, description="replicas that ipufit drives")
