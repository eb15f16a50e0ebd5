"""Foreign trace formats: one file for each format or family of formats."""
