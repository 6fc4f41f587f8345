"""A/B comparison: one pipeline, several engines, answers and cost side by side.

    from graftlm.ab import assert_faster, assert_same_answers, compare

    comparison = compare("city.py", engines=("hf", "graftlm"))
    assert_same_answers(comparison)
    assert_faster(comparison, by=1.5)

A file "city.py" defines the pipeline; see `graftlm.ab.pipeline.Pipeline`. Importing this package loads no framework.
"""

from graftlm.ab.compare import compare
from graftlm.ab.comparison import Comparison, EngineResult, assert_faster, assert_same_answers
from graftlm.ab.measure.profile import Round
from graftlm.ab.statistics import Ratio

__all__ = ["Comparison", "EngineResult", "Ratio", "Round", "assert_faster", "assert_same_answers", "compare"]
