"""``python -m benchmarks kernel``: decode attention compared with other kernels and with the roof.

The data flow: tree sets (data) → cases with page tables and tensors (:mod:`case_inputs`) → each
method of :mod:`methods` checked against float64 and timed → one row for each case
(:mod:`kernel_rows`) → tables and plots.
"""
