"""Answers on the wire, in the form of the OpenAI API: JSON objects, server-sent events and errors.

Every answer of the chat and completion routes passes here. The constant bytes of a stream's chunks are built once, so
that a chunk costs the encoding of its text and one write per engine step.
"""
