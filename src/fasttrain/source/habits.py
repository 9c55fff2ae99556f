"""What a script does that matters to its speed and to fasttrain's levers, read from its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from fasttrain.model.script import Evidence


class Habit(StrEnum):
    """One thing that scripts do."""

    AUTOCAST = "autocast"
    SCALER = "gradient scaler"
    PRECISION = "precision of a framework"
    DTYPE = "models in another dtype"
    COMPILE = "own torch.compile"
    TORCHSCRIPT = "TorchScript"
    SECOND_DERIVATIVES = "second derivatives"
    RETAINED_GRAPH = "retained graph"
    RECURRENT = "recurrent layers"
    SYNC_BN = "SyncBatchNorm"
    DATA_PARALLEL = "DataParallel"
    MATMUL = "own matmul precision"
    CUDNN = "cuDNN switches"
    DETERMINISTIC = "deterministic algorithms"
    ANOMALY = "anomaly detection"
    OPTIMIZER = "optimizers"
    IMPLEMENTATION = "own optimizer implementation"
    SPARSE = "sparse gradients"
    LOADER = "data loaders"
    NO_WORKERS = "data loaders without workers"
    NO_PINNING = "data loaders without pinned memory"
    PERSISTENT = "persistent workers"
    SYNC = "waits in each step"
    WHOLE_MODEL = "saved whole models"
    DEEPCOPY = "copied models"
    DEVICE = "hard-coded devices"
    VISIBLE = "own CUDA_VISIBLE_DEVICES"
    FRAMEWORK = "training frameworks"


@dataclass(frozen=True, slots=True)
class Habits:
    """Everything of that kind that was found.

    Attributes:
        found: Each habit's places, in the order of the modules and their lines.
        open: Those of them where a condition, or a value that is no literal, decides.
    """

    found: dict[Habit, tuple[Evidence, ...]] = field(default_factory=dict)
    open: tuple[Evidence, ...] = ()

    def of(self, habit: Habit) -> tuple[Evidence, ...]:
        """Give the places of a habit; none if it was not found."""
        return self.found.get(habit, ())

    def sure(self, *habits: Habit) -> Evidence | None:
        """Give the first place of some habits that no condition decides on."""
        return next((e for h in habits for e in self.of(h) if e not in self.open), None)

    def any(self, *habits: Habit) -> Evidence | None:
        """Give the first place of some habits, one that is sure before those that aren't."""
        return self.sure(*habits) or next((e for h in habits for e in self.of(h)), None)
