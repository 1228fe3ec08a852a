"""Simulator: goodput and bandwidth models, virtual clusters in virtual time, and replay of tapes."""
