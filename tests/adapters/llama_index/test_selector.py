from __future__ import annotations

from llama_index.core.schema import NodeWithScore, TextNode

from graftlm.adapters.llama_index import RepeatingOrder


def test_retrieved_nodes_come_in_the_order_in_which_they_were_first_retrieved() -> None:
    a, b, c = (NodeWithScore(node=TextNode(text=text), score=1.0) for text in "abc")
    order = RepeatingOrder()
    assert order.postprocess_nodes([b, a]) == [b, a]
    assert order.postprocess_nodes([c, a, b]) == [b, a, c]
