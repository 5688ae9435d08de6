"""What training left behind, as something to keep: a prm checkpoint, or a model that plain transformers opens.

sources       find it: the checkpoint or resume state of a run directory, a native ZeRO directory
zero          gather the weights of a ZeRO directory
rebuild       a live model of a run's configuration and gathered weights
prm_format    a prm checkpoint of either, verified
hugging_face  the adapter merged into the backbone, verified; model_card writes its README.md
classifier    the reward of one user as a sequence classifier, verified
"""
