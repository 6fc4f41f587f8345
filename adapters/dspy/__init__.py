"""DSPy on GraftLM: an LM whose engine is a runtime in this process, and an adapter whose replies always parse.

import dspy
from graftlm.adapters.dspy import GraftAdapter, GraftLM

dspy.configure(lm=GraftLM("sprout"), adapter=GraftAdapter())
"""

from graftlm.adapters.dspy.adapter import GraftAdapter
from graftlm.adapters.dspy.engine import AsyncEngine, Engine
from graftlm.adapters.dspy.lm import GraftLM
from graftlm.adapters.dspy.sharing import BestOfN

__all__ = ["AsyncEngine", "BestOfN", "Engine", "GraftAdapter", "GraftLM"]
