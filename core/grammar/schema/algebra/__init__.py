"""Sets of JSON values (shapes) with intersection, complement, emptiness and inclusion.

Every schema is read into shapes. `allOf`, `not`, `oneOf` and `if` need the operations: a third of the public schemas
test the emptiness of strings. Each operation is memoised for one schema.
"""
