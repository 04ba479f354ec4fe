"""The shape of an attention: heads, dtypes, query blocks, and the limits of the kernels."""
