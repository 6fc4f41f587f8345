"""Guidance on GraftLM: a model object whose engine is a runtime in this process.

from graftlm.adapters.guidance import GraftModel
from guidance import gen

lm = GraftModel("sprout")
lm += "The answer is " + gen("answer", regex=r"[0-9]+")
"""

from graftlm.adapters.guidance.engine import GraftEngine
from graftlm.adapters.guidance.model import GraftModel

__all__ = ["GraftEngine", "GraftModel"]
