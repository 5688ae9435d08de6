raise ModuleNotFoundError("recipes are run, not imported: python recipes/reward_model.py fit --config ...")
