"""All settings of a run, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hyperslab.errors import ConfigError, check_choice
from hyperslab.layout import AXES
from hyperslab.trace.active import LEVELS

TASKS = ("regression", "classification", "segmentation", "reconstruction")
PRECISIONS = ("auto", "fp64", "fp32", "tf32", "bf16")
DECAYS = ("none", "polynomial", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    name: str
    """One of ``hyperslab.models.MODELS``, or a class or function of yours that makes a module:
    ``package.module:Name`` or ``path/to/file.py:Name``."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments."""

    weights: str | None = None
    """A safetensors file to begin with, as ``hyperslab export`` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    files: str | Sequence[str]
    """Files, or patterns such as ``cosmo/*.h5``."""

    preset: str | None = None
    """A known schema, one of ``hyperslab.io.PRESETS``; what is given below comes before it."""

    sample: str | None = None
    """The array that holds the sample."""

    target: str | Sequence[str] | None = None
    """The array or arrays that belong to it."""

    axes: str | Mapping[str, str] | None = None
    """The dims of the sample in the file's order, such as ``DHWC`` or ``NCHW``, or a table of those
    of several arrays by name."""

    stats: str | None = None
    """The array with each sample's own statistics."""

    format: str | None = None
    """The file format, where the suffix does not tell it."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the format, such as ``dtype`` and ``shape`` of raw files."""

    external: bool = True
    """Whether files may take data from others that they name, as HDF5's links do."""

    beside: Mapping[str, str] = field(default_factory=dict)
    """Targets that lie in files of their own: patterns by name, as in ``label = "masks/*.nii"``, or
    a table, as in ``y = "targets.csv"``. Each of ``files``, ``validation`` and ``test`` must find
    its partner there, by name."""

    validation_beside: Mapping[str, str] = field(default_factory=dict)
    """The same for the files of ``validation``, where their targets lie elsewhere."""

    test_beside: Mapping[str, str] = field(default_factory=dict)
    """The same for the files of ``test``."""

    pair_by: str | None = None
    """What the names of partners have in common, where it is neither the name without folder and
    suffix nor what wildcards stand for: a regular expression with a group, a CSV file of pairs,
    ``order`` (of files) or ``row`` (sample by sample)."""

    columns: str | Sequence[str] | None = None
    """Of the table in ``beside``, those with the numbers; left out, all but ``key``. One name
    gives one number a sample, a list a vector."""

    key: str | None = None
    """Its column that names the samples' files; left out, the first."""

    attributes: str | Sequence[str] = ()
    """Of the samples' own HDF5 files, those that are the target ``attributes``: ``mass`` of the
    file, ``galaxy@mass`` of an array or a group in it."""

    tile: Sequence[int] | int | None = None
    """Cuts every sample into tiles of these spatial extents, each a sample of its own."""

    validation: float | str | Sequence[str] = 0.1
    """The part of the samples, or other files, to evaluate on after epochs; 0 is none."""

    test: float | str | Sequence[str] = 0.1
    """The same, to evaluate on at the end."""

    labelled_fraction: float = 1.0
    """The part of the samples to train on whose labels are used; the others are left out. Drawn by
    ``train.seed``: a larger part has all of a smaller one, and classes keep their shares."""

    batch_size: int = 1
    """Samples in one step, over all ranks."""

    eval_batch_size: int | None = None
    """The same for evaluation; left out, that of one forward pass in training."""

    shuffle: str = "global"
    """``global``, ``local`` or ``none``; see ``hyperslab.Loader`` for this and what follows."""

    store: str = "memory"
    prefetch: int = 2
    drop_last: bool = False
    normalize: str | Mapping[str, Any] | None = None
    """``log1p``, ``minmax``, ``standard``, or the arguments of ``hyperslab.Normalize``."""

    augment: str | None = None
    bad_samples: str = "stop"
    memory_budget: int | str | None = None
    spill_dir: str | None = None
    preload: bool = False
    stage_dir: str | None = None
    transport: str = "torch"
    threads: int | None = None

    def __post_init__(self) -> None:
        _at_least("data.batch_size", self.batch_size, 1)
        _at_least("data.eval_batch_size", self.eval_batch_size, 1)
        _at_least("data.prefetch", self.prefetch, 0)
        for name in ("validation", "test"):
            part = getattr(self, name)
            if isinstance(part, int | float) and not 0 <= part < 1:
                raise ConfigError(
                    f"data.{name} must be a fraction from 0 to below 1, or files, got {part}"
                )
        for name in ("validation", "test"):
            self._check_beside(name)
        if not 0 < self.labelled_fraction <= 1:
            raise ConfigError(
                "data.labelled_fraction must be above 0 and at most 1, which is all samples to "
                f"train on, got {self.labelled_fraction}"
            )
        parts = [part for part in (self.validation, self.test) if isinstance(part, int | float)]
        if sum(parts) >= 1:
            raise ConfigError(
                f"data.validation = {self.validation} and data.test = {self.test} leave no "
                "samples to train on: together they must be below 1"
            )

    def _check_beside(self, part: str) -> None:
        given = getattr(self, f"{part}_beside")
        if given and isinstance(getattr(self, part), int | float):
            raise ConfigError(
                f"data.{part}_beside names targets of files for {part}, but data.{part} = "
                f"{getattr(self, part)} takes them from data.files: name files, or leave it out"
            )
        if unknown := [name for name in given if name not in self.beside]:
            raise ConfigError(
                f"data.{part}_beside has {unknown[0]!r}, which data.beside has not: it has "
                f"{', '.join(self.beside) or 'none'}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """How many ranks there are along each axis; ``sample`` takes what the others leave."""

    auto: bool = False
    """Leaves the axes to the planner, for as many ranks as there are: ``mesh=auto`` in short."""

    sample: int | None = None
    channel: int = 1
    depth: int = 1
    height: int = 1
    width: int = 1

    device: str | None = None
    """``cpu`` or ``cuda``; left out, a GPU if there is one."""

    timeout_seconds: float = 600.0
    """A rank that waits longer than this for another stops."""

    transport: str = "auto"
    """How messages between GPUs travel, as for ``hyperslab.init``: ``auto``, ``device``, ``nccl``
    or ``host``."""

    def __post_init__(self) -> None:
        for axis in AXES:
            _at_least(f"mesh.{axis}", getattr(self, axis), 1)
            if self.auto and getattr(self, axis) not in (None, 1):
                raise ConfigError(
                    f"mesh.auto leaves the axes to the planner, but mesh.{axis} = "
                    f"{getattr(self, axis)}: leave out one of them (mesh.auto=false)"
                )
        _above("mesh.timeout_seconds", self.timeout_seconds, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    kind: str = "regression"
    """``regression`` (numbers), ``classification`` (one class a sample), ``segmentation`` (a class
    for every cell) or ``reconstruction`` (the sample itself)."""

    names: Sequence[str] = ()
    """Of the numbers or classes, for tables and figures."""

    loss: str | None = None
    """A name of ``hyperslab.train.losses.LOSSES``, or a function of yours, ``module:function``, of
    output and target; left out, the usual one: ``mse``, or ``cross_entropy``."""

    target: str | None = None
    """The array to learn; left out, the first target of the data."""

    weight: str | None = None
    """The array that weighs each sample in the loss and in accuracy, if there is one."""

    class_weights: Sequence[float] = ()
    """What each class counts in the loss."""

    def __post_init__(self) -> None:
        check_choice("task.kind", self.kind, TASKS)
        if len({*self.names}) < len(self.names):
            raise ConfigError(f"task.names must differ from each other, got {list(self.names)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    name: str = "adam"
    """``adam``, ``adamw``, ``sgd``, ``lamb``, or a class of yours, ``module:Class``."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    """Not for biases and the weights of normalisations."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """More keyword arguments of the optimizer, such as ``betas`` or ``momentum``."""

    def __post_init__(self) -> None:
        _above("optimizer.lr", self.lr, 0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time: it rises evenly, then falls."""

    warmup_epochs: float = 0.0
    """It rises from 0 over these; fractions are welcome."""

    decay: str = "none"
    """How it falls: ``none``, ``polynomial`` or ``cosine``."""

    decay_epochs: float | None = None
    """The epoch at which it has fallen to ``final``; left out, the last."""

    power: float = 1.0
    """Of the polynomial; 1 is a line."""

    final: float = 0.0
    """The last learning rate, as a fraction of the highest."""

    def __post_init__(self) -> None:
        check_choice("schedule.decay", self.decay, DECAYS)
        _at_least("schedule.warmup_epochs", self.warmup_epochs, 0)
        _above("schedule.decay_epochs", self.decay_epochs, 0)
        _above("schedule.power", self.power, 0)
        if self.decay_epochs is not None and self.decay_epochs <= self.warmup_epochs:
            raise ConfigError(
                f"schedule.decay_epochs = {self.decay_epochs} must be above "
                f"schedule.warmup_epochs = {self.warmup_epochs}: decay follows the warm-up"
            )
        if not 0 <= self.final <= 1:
            raise ConfigError(f"schedule.final must be from 0 to 1, got {self.final}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    epochs: int = 10
    steps: int | None = None
    """Stops after this many steps, if that is before the last epoch."""

    seed: int = 0
    """Of weights, order of samples, split, augmentation and dropout."""

    precision: str = "fp32"
    """``fp64``, ``fp32``, ``tf32`` (fp32 with shorter products on GPUs), ``bf16`` (mixed, on GPUs
    alone) or ``auto`` (``bf16`` on GPUs, ``fp32`` on CPUs)."""

    channels_last: bool = False
    """Keeps channels innermost in memory, which GPUs prefer with ``bf16``."""

    accumulate: int = 1
    """Forward and backward passes in one step, each on an equal part of the batch."""

    clip: float | None = None
    """Scales gradients whose norm, over all weights, is larger than this down to it."""

    checkpoint_activations: Sequence[str] = ()
    """Patterns of module names whose activations are computed again in the backward pass rather
    than kept, such as ``features.*``."""

    depth_first: str | Sequence[str] = "auto"
    """Names of modules that are computed tile by tile, such as ``features.0`` or, for children of
    an ``nn.Sequential`` together, ``features.0-2``: nothing inside them is kept. ``auto`` picks
    them on GPUs where memory is short."""

    cuda_graphs: bool | str = "auto"
    """Has passes recorded in CUDA graphs and replayed. ``auto`` does so with models of hyperslab
    where the host is slower than the GPU; with ``true``, Python code of a model of yours no longer
    runs once a pass was recorded."""

    shard_weights: bool = False
    """Spreads weights and optimizer state over all ranks (FSDP2)."""

    batch_stats: str = "global"
    """BatchNorm's statistics are of the ``global`` batch, or of the ranks that share a sample
    (``spatial``)."""

    evaluate_every: int = 1
    """Epochs from one evaluation to the next."""

    patience: int | None = None
    """Stops when this many evaluations in a row were no better than the best."""

    def __post_init__(self) -> None:
        check_choice("train.precision", self.precision, PRECISIONS)
        check_choice("train.batch_stats", self.batch_stats, ("global", "spatial"))
        if self.cuda_graphs not in (True, False, "auto"):
            raise ConfigError(
                f"train.cuda_graphs must be true, false or auto, got {self.cuda_graphs!r}"
            )
        for name in ("epochs", "steps", "accumulate", "evaluate_every", "patience"):
            _at_least(f"train.{name}", getattr(self, name), 1)
        _at_least("train.seed", self.seed, 0)
        _above("train.clip", self.clip, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesConfig:
    """Pre-training of a stacked autoencoder, one pair after the other, before all are trained."""

    epochs: int | Sequence[int] | None = None
    """Of each stage: one number, or one for each pair from the outermost on; left out, there are
    no stages. ``train.epochs`` are those of all pairs together, which follow."""

    lr: float | Sequence[float] | None = None
    """The learning rate of each stage, in the same way; left out, ``optimizer.lr``."""

    noise: float | Sequence[float] = 0.0
    """The share of the numbers that are set to 0 before a stage's encoder is given them. Trained
    together, pairs are given samples with the noise of the first stage."""

    kl: float = 0.0
    """What the sparsity of codes from 0 to 1 (``activation = "sigmoid"``) counts in the loss: the
    mean over units j of rho log(rho / m_j) + (1 - rho) log((1 - rho) / (1 - m_j)), where m_j is
    the unit's mean over the batch, and over cells."""

    rho: float = 0.05
    """The mean that ``kl`` asks of every unit."""

    l1: float = 0.0
    """What the mean of the absolute values of the code counts in the loss."""

    def __post_init__(self) -> None:
        for name in ("epochs", "kl", "l1"):
            for value in _each(getattr(self, name)):
                _at_least(f"stages.{name}", value, 0)
        for value in _each(self.lr):
            _above("stages.lr", value, 0)
        for value in _each(self.noise):
            if not 0 <= value < 1:
                raise ConfigError(f"stages.noise must be from 0 to below 1, got {value}")
        if not 0 < self.rho < 1:
            raise ConfigError(f"stages.rho must be between 0 and 1, got {self.rho}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig:
    """The encoder of a stacked autoencoder with a head, which learns ``task`` from labels."""

    run: str | None = None
    """The folder of the run that pre-trained it. The model, the data and ``train.seed`` are those
    of that run, but for what is set here."""

    outputs: int | None = None
    """Numbers that the head gives: as many as there are to learn, or classes."""

    hidden: Sequence[int] = ()
    """The widths of layers before the last."""

    cells: int = 1
    """A code with space is averaged to so many cells along each dim before them."""

    pool: str = "mean"
    """What the head sees of a code with space: the ``mean`` of each channel, or the first two
    ``moments``: its standard deviation too. Fluctuations of matter show in the second."""

    standardize: bool = False
    """Gives the numbers of the code mean 0 and variance 1 over the batch (BatchNorm)."""

    dropout: float = 0.0
    """After each of ``hidden``."""

    encoder_rate: float = 1.0
    """Times ``optimizer.lr`` is the learning rate of the encoder; below 1 it stays closer to what
    it was, while the head learns."""

    frozen: bool = False
    """Trains the head alone."""

    from_scratch: bool = False
    """Leaves the encoder as it was drawn, to compare."""

    def __post_init__(self) -> None:
        _at_least("finetune.outputs", self.outputs, 1)
        _at_least("finetune.cells", self.cells, 1)
        check_choice("finetune.pool", self.pool, ("mean", "moments"))
        if self.encoder_rate <= 0:
            raise ConfigError(
                f"finetune.encoder_rate must be above 0, got {self.encoder_rate}: to leave the "
                "encoder as it is, set finetune.frozen = true"
            )
        if self.from_scratch and self.run is not None:
            raise ConfigError(
                f"finetune.from_scratch takes no weights from finetune.run = {self.run!r}: leave "
                "out one of them"
            )

    @property
    def is_asked(self) -> bool:
        return self.run is not None or self.from_scratch or self.outputs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    folder: str | None = None
    """For all that the run writes; left out, ``runs/`` and the name of the configuration."""

    log_every: int = 10
    """Steps from one line of the log to the next."""

    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next; left out, there is one after every epoch."""

    keep: int = 2
    """Checkpoints kept beside the best."""

    tensorboard: bool = True
    figures: bool = True
    trace: str = "coarse"
    """What is recorded of where time goes: ``coarse`` (reads, batches, passes, messages), at a cost
    of less than 0.5% of a step, ``detailed`` (every layer too) or ``off``."""

    def __post_init__(self) -> None:
        check_choice("run.trace", self.trace, LEVELS)
        for name in ("log_every", "checkpoint_every", "keep"):
            _at_least(f"run.{name}", getattr(self, name), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TournamentConfig:
    """Several models that are trained at once, each on its share of the ranks."""

    trainers: int = 1
    """Models that play against each other; each has a mesh of its own, as [mesh] says."""

    every: int = 100
    """Steps from one match to the next."""

    method: str = "pairs"
    """Random `pairs` exchange models, score both, and each goes on with the better; in a
    `population` the last by score take over models of the first."""

    data: str = "share"
    """Each trainer trains on a `share` of the samples, all of equal size, or on `all` of them."""

    held_out: float = 0.1
    """The fraction of a trainer's samples that models are scored on in matches, and that it does
    not train on. In a population, and with data = `all`, they are the same for all trainers."""

    carry: Sequence[str] = ("optimizer", "step")
    """What comes with a model that is taken over, beside its weights and hyperparameters: the
    `optimizer` state, the `step` (its place in the schedule), `rng` (the random generators)."""

    ranges: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ between trainers, with the lowest and the highest value of each, as
    `"optimizer.lr" = [1e-4, 1e-2]`: numbers of [optimizer], of its options, and of [schedule],
    `train.clip` and `task.class_weights.1`. Each trainer begins somewhere in the range."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ between trainers, with one value for each, as
    `"optimizer.lr" = [1e-3, 3e-3]`; they may have ranges too."""

    perturb: float | None = None
    """What settings with a range are multiplied or divided by when a model is taken over; left out,
    1.25 in a population, and 1 in pairs. No value leaves its range."""

    fraction: float = 0.25
    """The part of a population that is taken over, and that takes over."""

    meshes: Sequence[Mapping[str, int]] = ()
    """The axes of each trainer's mesh, where they differ, as `[{depth = 2}, {sample = 2}]`."""

    timeout_seconds: float = 300.0
    """A trainer that comes to a match later than this is played without."""

    def __post_init__(self) -> None:
        _at_least("tournament.trainers", self.trainers, 1)
        _at_least("tournament.every", self.every, 1)
        check_choice("tournament.data", self.data, ("share", "all"))
        _above("tournament.timeout_seconds", self.timeout_seconds, 0)
        if not 0 <= self.held_out < 1:
            raise ConfigError(
                f"tournament.held_out must be from 0 to below 1, got {self.held_out}: it is a "
                "fraction of the samples to train on"
            )
        if self.meshes and len(self.meshes) != self.trainers:
            raise ConfigError(
                f"tournament.meshes has {len(self.meshes)} meshes for {self.trainers} trainers: "
                "give one for each, or none"
            )
        for number, axes in enumerate(self.meshes):
            for axis, size in axes.items():
                if axis not in AXES or size < 1:
                    raise ConfigError(
                        f"tournament.meshes[{number}] has {axis} = {size}: a mesh has numbers of "
                        f"ranks along {', '.join(AXES)}"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A run; each field is a table of the TOML file."""

    model: ModelConfig
    data: DataConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    tournament: TournamentConfig = field(default_factory=TournamentConfig)
    plan: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    """Other cuts of the same ranks for some modules, by patterns of their names, as the `plan` of
    `hyperslab.parallelize`: `"encoder.*" = {channel = 2, sample = 2, split = "blocks"}`."""

    def mesh_of(self, trainer: int) -> MeshConfig:
        """The mesh of one trainer of a tournament."""
        axes: Any = self.tournament.meshes[trainer] if self.tournament.meshes else {}
        return replace(self.mesh, **axes)

    def __post_init__(self) -> None:
        if self.data.batch_size % self.train.accumulate:
            raise ConfigError(
                f"data.batch_size = {self.data.batch_size} cannot be cut into train.accumulate = "
                f"{self.train.accumulate} equal parts: choose a multiple"
            )
        _check_stages(self)
        if self.train.shard_weights and self.train.channels_last:
            raise ConfigError(
                "train.shard_weights spreads only weights that lie in memory as usual: set "
                "train.channels_last = false"
            )
        if self.train.shard_weights and self.optimizer.name == "lamb":
            raise ConfigError(
                "optimizer.name = 'lamb' needs the norms of whole weights, which "
                "train.shard_weights cuts: choose adam, adamw or sgd, or keep weights whole"
            )


def _check_stages(config: Config) -> None:
    """Raises where stages, fine-tuning and the rest of a configuration exclude each other."""
    if config.stages.epochs is None:
        return
    if config.finetune.is_asked:
        raise ConfigError(
            "stages.epochs pre-train an autoencoder, and [finetune] trains an encoder with a head: "
            "set stages.epochs = none here, and name the pre-trained run in finetune.run"
        )
    if config.task.kind != "reconstruction":
        raise ConfigError(
            "stages.epochs train pairs to give back what they are given: set task.kind = "
            f"'reconstruction', got {config.task.kind!r}"
        )
    if config.tournament.trainers > 1:
        raise ConfigError(
            f"tournament.trainers = {config.tournament.trainers} play with one model each, and "
            "stages.epochs change what is trained: let trainers play with what the stages have made"
        )
    if config.task.weight is not None:
        raise ConfigError(
            f"task.weight = {config.task.weight!r} weighs samples, which codes do not tell: leave "
            "it out where there are stages.epochs"
        )
    if config.stages.kl and config.train.accumulate > 1:
        raise ConfigError(
            "stages.kl is of the means over the whole batch, which train.accumulate = "
            f"{config.train.accumulate} cuts into passes: set it to 1, or use stages.l1"
        )
    if config.train.shard_weights:
        raise ConfigError(
            "stages freeze and thaw weights, which train.shard_weights (FSDP2) does not follow: "
            "leave it out; dense layers and channels are cut by mesh.channel"
        )


def _each(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise ConfigError(f"{key} must be at least {least}, got {value}")


def _above(key: str, value: float | None, bound: float) -> None:
    if value is not None and not value > bound:
        raise ConfigError(f"{key} must be above {bound}, got {value}")
