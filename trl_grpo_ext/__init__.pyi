# What type checkers and editors see of the lazy names; `tests/test_architecture.py` keeps it in step.

from trl_grpo_ext.advantages import (
    Adaptive as Adaptive,
)
from trl_grpo_ext.advantages import (
    AdvantageOutput as AdvantageOutput,
)
from trl_grpo_ext.advantages import (
    AdvantageStrategy as AdvantageStrategy,
)
from trl_grpo_ext.advantages import (
    BatchWhiten as BatchWhiten,
)
from trl_grpo_ext.advantages import (
    Chain as Chain,
)
from trl_grpo_ext.advantages import (
    Clip as Clip,
)
from trl_grpo_ext.advantages import (
    LeaveOneOut as LeaveOneOut,
)
from trl_grpo_ext.advantages import (
    LengthBucketed as LengthBucketed,
)
from trl_grpo_ext.advantages import (
    MeanCentered as MeanCentered,
)
from trl_grpo_ext.advantages import (
    Mix as Mix,
)
from trl_grpo_ext.advantages import (
    OptimalBaseline as OptimalBaseline,
)
from trl_grpo_ext.advantages import (
    PerReward as PerReward,
)
from trl_grpo_ext.advantages import (
    Rank as Rank,
)
from trl_grpo_ext.advantages import (
    RobustZScore as RobustZScore,
)
from trl_grpo_ext.advantages import (
    Scale as Scale,
)
from trl_grpo_ext.advantages import (
    Transform as Transform,
)
from trl_grpo_ext.advantages import (
    ZScore as ZScore,
)
from trl_grpo_ext.batch import RewardBatch as RewardBatch
from trl_grpo_ext.config import GRPOExtConfig as GRPOExtConfig
from trl_grpo_ext.errors import (
    ArgumentError as ArgumentError,
)
from trl_grpo_ext.errors import (
    CompatibilityError as CompatibilityError,
)
from trl_grpo_ext.errors import (
    ConfigError as ConfigError,
)
from trl_grpo_ext.errors import (
    GRPOExtError as GRPOExtError,
)
from trl_grpo_ext.errors import (
    GRPOExtWarning as GRPOExtWarning,
)
from trl_grpo_ext.errors import (
    RewardError as RewardError,
)
from trl_grpo_ext.errors import (
    ShapeError as ShapeError,
)
from trl_grpo_ext.errors import (
    SpecError as SpecError,
)
from trl_grpo_ext.errors import (
    StateError as StateError,
)
from trl_grpo_ext.hub import load_strategies as load_strategies
from trl_grpo_ext.hub import push_strategies as push_strategies
from trl_grpo_ext.kl import (
    K1 as K1,
)
from trl_grpo_ext.kl import (
    K2 as K2,
)
from trl_grpo_ext.kl import (
    K3 as K3,
)
from trl_grpo_ext.kl import (
    AbsK as AbsK,
)
from trl_grpo_ext.kl import (
    AdaptiveBeta as AdaptiveBeta,
)
from trl_grpo_ext.kl import (
    BetaControl as BetaControl,
)
from trl_grpo_ext.kl import (
    ConstantBeta as ConstantBeta,
)
from trl_grpo_ext.kl import (
    ExactKL as ExactKL,
)
from trl_grpo_ext.kl import (
    K3Plus as K3Plus,
)
from trl_grpo_ext.kl import (
    KLEstimator as KLEstimator,
)
from trl_grpo_ext.kl import (
    LinearBeta as LinearBeta,
)
from trl_grpo_ext.kl import (
    SampledKL as SampledKL,
)
from trl_grpo_ext.reference import (
    AdapterOff as AdapterOff,
)
from trl_grpo_ext.reference import (
    FrozenAdapter as FrozenAdapter,
)
from trl_grpo_ext.reference import (
    FullCopy as FullCopy,
)
from trl_grpo_ext.reference import (
    MovingAnchor as MovingAnchor,
)
from trl_grpo_ext.reference import (
    ReferenceStrategy as ReferenceStrategy,
)
from trl_grpo_ext.rewards import (
    AdapterRewardModel as AdapterRewardModel,
)
from trl_grpo_ext.rewards import (
    ClipReward as ClipReward,
)
from trl_grpo_ext.rewards import (
    CosineLength as CosineLength,
)
from trl_grpo_ext.rewards import (
    GroupLengthReward as GroupLengthReward,
)
from trl_grpo_ext.rewards import (
    LengthPenalty as LengthPenalty,
)
from trl_grpo_ext.rewards import (
    PairwiseWinRate as PairwiseWinRate,
)
from trl_grpo_ext.rewards import (
    PassRateLengthPenalty as PassRateLengthPenalty,
)
from trl_grpo_ext.rewards import (
    RepetitionPenalty as RepetitionPenalty,
)
from trl_grpo_ext.rewards import (
    RetryReward as RetryReward,
)
from trl_grpo_ext.rewards import (
    RewardModel as RewardModel,
)
from trl_grpo_ext.rewards import (
    RewardWrapper as RewardWrapper,
)
from trl_grpo_ext.rewards import (
    ScaleReward as ScaleReward,
)
from trl_grpo_ext.rewards import (
    ShapingStrategy as ShapingStrategy,
)
from trl_grpo_ext.rewards import (
    SoftOverlong as SoftOverlong,
)
from trl_grpo_ext.specs import from_spec as from_spec
from trl_grpo_ext.specs import to_spec as to_spec
from trl_grpo_ext.trainer import GRPOExtTrainer as GRPOExtTrainer

__version__: str
__all__: list[str]
