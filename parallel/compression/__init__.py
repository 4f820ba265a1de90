"""Gradients on the wire: codecs, error feedback, transports. Imports `kernels` and `parallel` only."""
