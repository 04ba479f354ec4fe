"""Hosts: thin adapters between serving engines and the library. One folder a host."""
