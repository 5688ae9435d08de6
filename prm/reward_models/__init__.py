"""Personalized reward models: one file a method, named in YAML and in checkpoints by class path."""

from prm.reward_models.base import FeatureReward
from prm.reward_models.global_bt import GlobalBT, GlobalMean
from prm.reward_models.lore import LoRE, LoREAlt
from prm.reward_models.mpu import MPU, MPUAvg
from prm.reward_models.pal import PALA, PALB
from prm.reward_models.pref import PReF
from prm.reward_models.vpl import VPL

__all__ = ["MPU", "PALA", "PALB", "VPL", "FeatureReward", "GlobalBT", "GlobalMean", "LoRE", "LoREAlt", "MPUAvg", "PReF"]
