"""Compile functions: Numba for the CPU, Triton for the GPU."""
