"""The papers' tables, measured with this project's kernels."""
