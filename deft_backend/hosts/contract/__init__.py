"""What we use of a host, and whether a host's source has it."""

from deft_backend.hosts.contract.check import Member, Problem, check_contract, installed_source

__all__ = ["Member", "Problem", "check_contract", "installed_source"]
