"""DSPy on GraftLM: an LM whose engine is a runtime in this process, and an adapter whose replies always parse.

It serves every call of a DSPy program. From 64 threads a call costs 1.1 to 1.3 ms of CPU time with `GraftAdapter`, of
which 0.6 to 0.8 ms are DSPy's own.

import dspy
from graftlm.adapters.dspy import GraftAdapter, GraftLM

dspy.configure(lm=GraftLM("sprout"), adapter=GraftAdapter())
"""

from graftlm.adapters.dspy.adapter import GraftAdapter
from graftlm.adapters.dspy.engine import AsyncEngine, Engine
from graftlm.adapters.dspy.lm import GraftLM
from graftlm.adapters.dspy.provider import register
from graftlm.adapters.dspy.sharing import BestOfN

register()

__all__ = ["AsyncEngine", "BestOfN", "Engine", "GraftAdapter", "GraftLM"]
