"""Reads the journal of a live or replayed run: figures, a trace, a timeline."""
