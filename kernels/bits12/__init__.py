"""bfloat16 weights and KV in 12 bits a number, without loss, and the kernels that read them (Hopper GPUs only).

Decode steps of up to 32 rows of a bfloat16 model read 12-bit weights, and all steps read 12-bit cached tokens: 3.3 ms
instead of 3.9 for one row of an 8B model. The codes take 0.77 of the weights' memory, beside the originals that larger
steps read. weight.py and weight_codec.py are for weights, the kv_*.py files for keys and values.
"""
