"""The kernels in Gluon for Hopper GPUs."""
