"""A small GRPO loop: how far a server's log-probabilities are from the trainer's, and the time.

One group of samples behind a long prompt in each step, from a real SGLang server, whose weights
follow the trainer's. The same loop runs with the host's backend and with tree attention, and with
the deterministic mode of both.
"""
