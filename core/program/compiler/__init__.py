"""Programs compiled over sample inputs: planned memory (`Program.plan`) and reordered prompts (`Program.compile`).

Both run the program's Python code over the sample with stand-ins for the model's answers. A program that is neither
planned nor compiled pays one comparison with None for each expression, call and read.
"""
