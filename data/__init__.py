"""Text to tokens to batches: corpus, tokenizer, .bin/.idx, packed samples, blends, micro-batches, bigram baseline.

May import `kernels` and `parallel` (and needs neither); never `model`. Only `batches.py` imports torch, so that the
worker processes of preprocessing start in a fraction of a second. Formats and flags follow Megatron-LM.
"""
