"""A run in a store: written as it happens, read by the process that goes on with it."""
