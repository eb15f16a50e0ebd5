"""A first guess at a scenario, from a GPU and a model."""
