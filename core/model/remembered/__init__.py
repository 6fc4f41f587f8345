"""Results of earlier loads on disk: passed self-tests, and weights in panels. A second process needs neither again.

Serves every start on a CPU after the first one of a model; of SmolLM2 it saves most of the load.
"""
