"""Run the integration tests on any version of a host, each version in its own environment.

It needs only Python: outside the environments it imports only the standard library.
"""
