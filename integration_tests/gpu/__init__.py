"""Tests that start real servers on GPUs; without one they are skipped."""
