"""Pictures and videos in prompts: from a caller's object to pixels, within limits, and to the inputs of a model.

Only requests with a picture or a video enter this folder. A known picture costs the hash of its bytes; a new one costs
its decoding and its processor, 10 ms to 100 ms a megapixel, on threads beside the engine. Pillow is imported by the
first picture.
"""
