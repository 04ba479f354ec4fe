"""Inject faults into real servers of both hosts, and check that every answer stays right."""
