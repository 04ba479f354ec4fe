"""Run the integration tests on any version of a host, each in an environment of its own.

Runs on a bare Python: nothing but the standard library is imported outside the environments.
"""
