"""Tuning: which policies and parameters suit a trace, a fleet and what the user allows."""
