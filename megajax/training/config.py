"""The sections `training` and `launch` of a configuration."""

import bisect
import dataclasses
from typing import Annotated, Literal

from megajax.fields.ranges import MAX_INT32, Coefficient, DropRate, NonNegativeInt, PositiveFloat, PositiveInt, Range
from megajax.mesh.config import MeshConfig
from megajax.models.interface import LossOptions
from megajax.training.batch_schedule import BatchSchedule

LossMean = Literal["token", "microbatch"]

MAX_PASSES = 1_000_000  # of microbatches through stages in a step: their order is a table (parallel/schedule.py)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    steps: PositiveInt = 1000
    """Optimizer steps of the whole run."""
    epochs: PositiveFloat | None = None
    """Passes over the training data, instead of steps, which are counted when the run starts; the warm-up is then at
    most a tenth of them. Default: 3 if --data.paths names conversations and neither is given, else None."""
    global_batch_size: PositiveInt = 8
    """Sequences per step, over all devices."""
    microbatch_size: PositiveInt | None = None
    """Sequences per data shard (mesh data x fsdp x expert) in one forward and backward pass; None: all, without
    gradient accumulation."""
    sequence_length: PositiveInt = 1024
    """Tokens per sequence."""
    seed: NonNegativeInt = 1234
    """Seed of the initial weights, the data order and dropout."""
    log_every_steps: PositiveInt = 10
    """Steps between two lines of metrics."""
    eval_every_steps: NonNegativeInt | None = None
    """Steps between two evaluations; 0: none; None: ten evaluations of a run on conversations in data.paths, otherwise
    none."""
    eval_steps: PositiveInt = 10
    """Batches per evaluation, of global_batch_size sequences each."""
    loss_mean: LossMean = "token"
    """token: mean over all tokens of the global batch; microbatch: mean over microbatches of their means (Megatron)."""
    batch_size_rampup: tuple[PositiveInt, PositiveInt, NonNegativeInt] | None = None
    """(start, increment, samples): grow the batch from `start` to global_batch_size by `increment` sequences at a time,
    over this many samples."""
    z_loss: Coefficient = 0.0
    """Weight of logsumexp^2 of the logits in the training loss."""
    label_smoothing: DropRate = 0.0
    """Probability mass moved from the label to the whole vocabulary in the training loss."""
    trained: tuple[str, ...] = ()
    """Parameters to train, by shell patterns of their names, such as *_bias; empty: all, or with lora.rank the
    adapters, *_lora_?."""
    frozen: tuple[str, ...] = ()
    """Of these, parameters not to train: for example layers.*.attention.*, embedding."""
    max_consecutive_skips: NonNegativeInt = 20
    """Stop after N consecutive skipped updates (not finite, or beyond optimizer.skip_grad_norm_above); 0: never. An
    overflow while the loss scale of fp16 can still be halved does not count."""
    check_replicas_every_steps: NonNegativeInt = 0
    """Every N steps, and before each save, compare the copies of parameters and optimizer state that several devices
    hold; if one differs, name its device and abort. 0: never."""
    sample_prompt: str = ""
    """Generate a sample from this prompt at the end of the run; empty: none."""

    def check(self) -> None:
        self.schedule(MeshConfig())

    def check_on(self, mesh: MeshConfig) -> None:
        """Raises ValueError if batch or sequence cannot be split over the mesh."""
        shards = mesh.batch_shards
        unit = shards * (self.microbatch_size or 1)
        for size in self.schedule(mesh).sizes:
            if size % unit:
                raise ValueError(
                    f"training.global_batch_size={size} is not divisible by {unit} = mesh data({mesh.data}) * fsdp("
                    f"{mesh.fsdp}) * expert({mesh.expert}) * training.microbatch_size({self.microbatch_size or 1}); "
                    f"use --training.global_batch_size={-(-size // unit) * unit}"
                )
        if mesh.pipeline > 1 and self.microbatch_size is None:
            raise ValueError(
                f"mesh.pipeline={mesh.pipeline} with training.microbatch_size=None has one microbatch, so that all "
                "stages but one would be idle; use --training.microbatch_size=1"
            )
        passes = self.schedule(mesh)(self.steps).num_microbatches * mesh.pipeline * mesh.virtual_stages
        if mesh.pipeline > 1 and passes > MAX_PASSES:
            raise ValueError(
                f"training.microbatch_size={self.microbatch_size} with training.global_batch_size="
                f"{self.global_batch_size} and mesh.pipeline={mesh.pipeline} makes a schedule of {passes} passes; the "
                f"limit is {MAX_PASSES}; use a larger --training.microbatch_size"
            )
        split = mesh.context * mesh.tensor
        if self.sequence_length % split:
            raise ValueError(
                f"training.sequence_length={self.sequence_length} is not divisible by {split} = mesh "
                f"context({mesh.context}) * tensor({mesh.tensor}); "
                f"use --training.sequence_length={-(-self.sequence_length // split) * split}"
            )

    @property
    def full_batch_steps(self) -> float:
        """Length of the run in steps of global_batch_size: `steps`, or fewer if the batch ramps up."""
        return self.schedule(MeshConfig()).num_samples(self.steps) / self.global_batch_size

    def steps_of(self, num_samples: float) -> int:
        """The steps that read that many samples, rounded up."""
        schedule = self.schedule(MeshConfig())
        return bisect.bisect_left(range(MAX_INT32), num_samples, lo=1, key=schedule.num_samples)

    @property
    def loss_options(self) -> LossOptions:
        return LossOptions(self.z_loss, self.label_smoothing)

    def schedule(self, mesh: MeshConfig) -> BatchSchedule:
        microbatch = self.microbatch_size and self.microbatch_size * mesh.batch_shards
        return BatchSchedule(self.global_batch_size, microbatch, self.batch_size_rampup)


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Settings of one start of a run: they may change each time and are not compared when it resumes."""

    exit_at_step: NonNegativeInt | None = None
    """Save and exit cleanly at this step."""
    exit_after_minutes: PositiveFloat | None = None
    """Save and exit cleanly after this many minutes."""
    hang_minutes: Annotated[float, Range(at_least=0, at_most=1_000_000)] = 30.0
    """Abort if any phase takes longer than this many minutes, with all stacks on stderr and exit status 1. Phases are
    connecting to the other processes, preparing the data, restoring, a step (the first one with its compilation), an
    evaluation, a save. 0: never."""
    max_restarts: NonNegativeInt = 0
    """Restart a run that crashes or hangs up to N times, but not after three crashes without a new step."""
    cpu_devices: Annotated[int, Range(at_least=0, at_most=4096)] = 0
    """Number of virtual CPU devices to use instead of GPUs, to try a mesh; 0: use the real devices."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """(first, last): write a profile of these steps to run_dir/profile."""

    def check(self, training_steps: int) -> None:
        if self.profile_steps is None:
            return
        first, last = self.profile_steps
        if first > last:
            raise ValueError(
                f"launch.profile_steps={first},{last} must be the first and the last step of the profile; "
                f"use --launch.profile_steps={last},{first}"
            )
        if first > training_steps:
            raise ValueError(
                f"launch.profile_steps={first},{last} is after the last step, training.steps={training_steps}; "
                "profile earlier steps"
            )
