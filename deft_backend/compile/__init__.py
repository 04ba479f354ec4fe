"""Compile kernels with Triton, ahead of their first launch and side by side."""
