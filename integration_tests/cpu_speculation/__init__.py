"""Plain-torch stand-ins for operations that SGLang's wheel for GPUs lacks on the CPU.

With them, real SGLang servers speculate on a machine without a GPU: NGRAM and STANDALONE. Each
stand-in follows the host's Triton kernel for the same purpose; each module names it. The package
that users install does not contain them.
"""
