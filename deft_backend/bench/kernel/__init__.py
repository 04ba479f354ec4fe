"""`deft bench kernel`: decode attention against its peers and against the roof, tree by tree.

Workloads (data) → page tables and tensors (:mod:`inputs`) → every method of :mod:`methods` checked
against float64 and timed → a row a case (:mod:`rows`) → table and plots.
"""
