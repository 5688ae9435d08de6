"""Personalized reward models: one file a method, named in YAML and in checkpoints by class path."""

from prm.reward_models.base import FeatureReward
from prm.reward_models.global_bt import GlobalBT
from prm.reward_models.lore import LoRE

__all__ = ["FeatureReward", "GlobalBT", "LoRE"]
