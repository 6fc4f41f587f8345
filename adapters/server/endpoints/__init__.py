"""The routes of `graftlm serve`: validation of bodies, native requests, and the objects of answers.

A body is parsed once per request, and chunks are written once per engine step. Models, health and metrics do not run
the model.
"""
