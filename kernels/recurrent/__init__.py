"""Layers with a state: gated delta rule, Mamba 2, short convolution, over a pool of states, for a ragged step.

Hybrid models (Qwen3-Next, Qwen3.5, LFM2, Granite 4, Nemotron-H, Bamba, Falcon-H1) run most of their layers here, in
every step. A decode row reads and writes its whole state, 2 MiB a layer for 32 heads of 128 x 128; a prompt costs
matmuls of chunks of 64 tokens. These are torch operations, correct on any device and fit for CUDA graphs.
"""
