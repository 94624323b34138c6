"""For all unit tests: litellm is imported without asking the network for its prices."""

from __future__ import annotations

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
