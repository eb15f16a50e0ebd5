"""Runs without a GPU: replays, a simulated instance, a simulated server, traces, tuning."""
