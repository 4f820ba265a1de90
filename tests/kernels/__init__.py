"""Tests of the kernels: each op against its PyTorch reference."""
