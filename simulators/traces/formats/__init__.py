"""Other people's traces: a file for each format, or family of formats."""
