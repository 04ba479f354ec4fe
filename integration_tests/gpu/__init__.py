"""Tests that start real servers on GPUs; without a GPU they are skipped."""
