"""Train a personalized reward model.

    torchrun --standalone --nproc-per-node 2 recipes/reward_model.py fit --config recipes/configs/pref_lamp/lore.yaml
    python recipes/reward_model.py fit --config recipes/configs/pref_lamp/lore.yaml --trainer.max_steps 10
    python recipes/reward_model.py fit --help

Everything in the YAML can be changed on the command line: `--model.reward_model.init_args.num_bases 16`.
"""

from data_modules.preference_data import PreferenceDataModule
from prm.training.cli import main
from prm.training.module import RewardModelModule

if __name__ == "__main__":
    main(RewardModelModule, PreferenceDataModule)
