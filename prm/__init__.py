"""prm: personalized reward models and style routers.

Importing the package needs only its core dependencies (numpy, pyarrow, PyYAML). It also switches off the usage
telemetry of the libraries it drives, for this process and the ones it starts, unless the user has set the variables.
"""

import os

__version__ = "0.1.0"

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_name, _value)
