"""MLA: the host's own kernel is stage 1; these kernels bring a plan to it and merge its results."""
