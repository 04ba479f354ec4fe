"""Compiling functions: Numba for the host, Triton for the device."""
