"""The LlamaIndex integration of GraftLM; everything lives in `graftlm.adapters.llama_index`."""

from graftlm.adapters.llama_index import GraftLLM, GraftSelector

__all__ = ["GraftLLM", "GraftSelector"]
