"""The members of a host that we use, and a check of the host's source for them."""

from deft_backend.hosts.contract.check import Member, Problem, check_contract, installed_source

__all__ = ["Member", "Problem", "check_contract", "installed_source"]
