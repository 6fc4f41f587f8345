"""JSON schemas of Python types, so narrow that pydantic reads every text that they admit.

Every pydantic class, TypeAdapter, dataclass and tool signature of LangChain, LlamaIndex, DSPy and `json_schema=`
passes through once: 0.6 ms for a class of ten fields, cached per class. A constraint without a keyword in JSON
Schema becomes a pattern. A constraint that no schema can hold becomes the keyword `x-unsupported`, which the reader
of schemas refuses.
"""
