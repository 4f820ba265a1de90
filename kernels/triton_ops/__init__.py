"""Triton kernels of the ops in `kernels`, one op a file; imported only where they run. Imports `kernels` only."""
