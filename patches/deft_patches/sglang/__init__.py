"""Patches of SGLang."""
