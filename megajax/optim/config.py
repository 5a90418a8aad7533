"""Configuration of the optimizer: update rules and their constants, parameter groups, learning-rate schedule."""

import dataclasses
from typing import Annotated

from megajax.fields.ranges import (
    Coefficient,
    Epsilon,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)
from megajax.optim.groups import UpdateRule, parse_group
from megajax.optim.loss_scale import LossScaleRule
from megajax.optim.moments import MomentFormat
from megajax.optim.schedule import Schedule, ScheduleStyle
from megajax.precision import PrecisionConfig

Momentum = Annotated[float, Range(at_least=0, below=1)]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, its constants, and the learning-rate schedule."""

    name: UpdateRule = "adamw"
    """Update rule; muon and normuon apply to the matrices of layers, and AdamW to all other parameters."""
    learning_rate: Annotated[float, Range(above=0, at_most=1000)] = 3e-4
    """Learning rate after the warm-up, the peak of the schedule."""
    min_learning_rate: Coefficient = 3e-5
    """Learning rate at the end of the decay and after it (not used by schedule constant)."""
    schedule: ScheduleStyle = "cosine"
    """Shape of the decay after the warm-up; the wsd ones are constant until they anneal at the end, wsd exponentially.
    Formulas in megajax/optim/schedule.py."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0; 0 starts at learning_rate. In this and the following fields, a step during a
    batch size ramp-up counts as its fraction of global_batch_size."""
    decay_steps: PositiveInt | None = None
    """Step at which min_learning_rate is reached, warm-up included; None: the end of the run."""
    wsd_decay_steps: NonNegativeInt = 0
    """Schedules wsd...: number of annealing steps at the end, before decay_steps."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    """Decay of the first and the second moment of AdamW, and of that of NorMuon, which takes the second; of the
    interpolation whose sign Lion takes, and of its only moment (0.98 or 0.99 are usual there)."""
    epsilon: Epsilon = 1e-8
    """AdamW, NorMuon: added to the square root of the second moment."""
    momentum: Momentum = 0.9
    """SGD, Muon: decay of the momentum (0.95 is usual for Muon)."""
    weight_decay: Coefficient = 0.1
    """Decay of weights and embeddings; biases and norm scales decay only if a group says so."""
    cautious_decay: bool = False
    """Decay only the numbers that the update moves towards zero anyway; not for SGD."""
    groups: tuple[str, ...] = ()
    """Parameters with another learning rate, decay or update rule: 'PATTERN field=value ...' with the fields
    learning_rate_scale, weight_decay, optimizer; the first match wins."""
    clip_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global L2 norm; 0: no clipping."""
    skip_grad_norm_above: NonNegativeFloat = 0.0
    """Skip updates whose gradient norm, before clipping, is larger; 0: skip only non-finite gradients."""
    moments: MomentFormat = "float32"
    """Format of the moments of matrices and embeddings between updates: bfloat16 halves their memory, float8 (e4m3 with
    a scale for each row) quarters it (docs/low_precision.md)."""
    loss_scale: tuple[PositiveFloat, PositiveFloat, NonNegativeInt, PositiveInt] = (2.0**32, 1.0, 1000, 2)
    """(initial, minimum, growth interval, hysteresis) of the loss scale of precision.recipe=fp16, as in Megatron; it is
    constant with a growth interval of 0 (docs/low_precision.md)."""
    shard_over_data: bool = False
    """Also split the optimizer state over the mesh axis data (ZeRO-1)."""
    offload_state: bool = False
    """Keep the moments in host memory between updates; slow over PCIe, see docs/memory.md."""

    def check(self, run_steps: float) -> None:
        """Raises ValueError for numbers that contradict each other. run_steps: TrainingConfig.full_batch_steps."""
        self.loss_scale_rule.check()
        groups = [parse_group(text) for text in self.groups]
        if self.cautious_decay and "sgd" in (self.name, *(group.optimizer for group in groups)):
            raise ValueError(
                "optimizer.cautious_decay=True is for updates to which the decay is added, and that of SGD is part of "
                "its gradient; use another rule, or --optimizer.cautious_decay=False"
            )
        if self.wsd_decay_steps and not self.schedule.startswith("wsd"):
            raise ValueError(
                f"optimizer.wsd_decay_steps={self.wsd_decay_steps} has no effect with optimizer.schedule="
                f"{self.schedule}; use --optimizer.schedule=wsd, or --optimizer.wsd_decay_steps=0"
            )
        if self.schedule == "constant":
            return
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"optimizer.min_learning_rate={self.min_learning_rate} must be at most optimizer.learning_rate="
                f"{self.learning_rate}; use --optimizer.min_learning_rate={self.learning_rate / 10:g}"
            )
        decay_steps = self.end_of_decay(run_steps)
        if self.warmup_steps >= decay_steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.warmup_steps} must be less than the decay steps ({decay_steps:.10g}: "
                "optimizer.decay_steps, or training.steps if that is None, in steps of the full batch); "
                "warm up for fewer steps or use --optimizer.schedule=constant"
            )
        most = decay_steps - self.warmup_steps
        if self.schedule.startswith("wsd") and not 0 < self.wsd_decay_steps <= most:
            raise ValueError(
                f"optimizer.wsd_decay_steps={self.wsd_decay_steps} must be in 1..{most:.10g} (decay steps "
                f"{decay_steps:.10g} minus warm-up {self.warmup_steps}); for example "
                f"--optimizer.wsd_decay_steps={max(1, int(most / 5))}"
            )

    def check_loss_scale(self, precision: PrecisionConfig) -> None:
        """Raises ValueError for a loss scale that the run does not use."""
        default = LossScaleRule(*OptimizerConfig.loss_scale)
        if self.loss_scale_rule != default and not precision.scales_loss:
            raise ValueError(
                f"optimizer.loss_scale={self.loss_scale_rule} has no effect with precision.recipe={precision.recipe}; "
                f"use --precision.recipe=fp16, or the default, --optimizer.loss_scale={default}"
            )

    @property
    def loss_scale_rule(self) -> LossScaleRule:
        return LossScaleRule(*self.loss_scale)

    def end_of_decay(self, run_steps: float) -> float:
        """decay_steps, or run_steps where it is None."""
        return run_steps if self.decay_steps is None else self.decay_steps

    def make_schedule(self, run_steps: float) -> Schedule:
        """The learning-rate schedule of a run of run_steps (TrainingConfig.full_batch_steps), after `check`."""
        self.check(run_steps)
        return Schedule(
            style=self.schedule,
            peak=self.learning_rate,
            minimum=self.min_learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=self.end_of_decay(run_steps),
            wsd_decay_steps=self.wsd_decay_steps,
        )
