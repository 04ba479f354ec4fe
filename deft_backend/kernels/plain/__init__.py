"""The kernels in Triton that run on every supported GPU, and on the CPU in the interpreter."""
