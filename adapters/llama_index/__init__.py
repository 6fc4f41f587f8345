"""LlamaIndex on GraftLM: `GraftLLM`, and `GraftSelector` for routers.

from graftlm.adapters.llama_index import GraftLLM

Settings.llm = GraftLLM(model="sprout")
"""

from graftlm.adapters.llama_index.errors import GraftCallError
from graftlm.adapters.llama_index.llm import GraftLLM
from graftlm.adapters.llama_index.selector import GraftSelector

__all__ = ["GraftCallError", "GraftLLM", "GraftSelector"]
